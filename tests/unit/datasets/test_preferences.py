"""Pairs of candidates: one row of each public layout, and the row that is expected of it; the order tells nothing of the label."""

import hashlib
import json
import random

import pytest
from PIL import Image

from lightrft.config.data import DataConfig, SourceConfig
from lightrft.config.model import ModelConfig
from lightrft.datasets.benchmarks import image_preferences, media_preferences, preference_pairs
from lightrft.datasets.open_source import open_source
from lightrft.datasets.prompt_dataset import PromptDataset
from lightrft.datasets.row_tables import READERS
from lightrft.models.loading.from_pretrained import load_tokenizer
from lightrft.models.processors import load_processor
from lightrft.models.tiny import save_tiny_media
from lightrft.utils.errors import DataError

ASK = "Two {noun} were made for this request:\n{request}\n\nCompare them by {by}."
BY = "how well each follows the request, and how good it is in itself"
END = (
    "\n\nWhich of the two {noun} is better? End with <answer>A</answer> or <answer>B</answer>{tie}."
)
TIE = ", or <answer>C</answer> if they are equally good"


def text(words):
    return {"type": "text", "text": words}


def first_by_hand(source, request, marks):
    """Which candidate is A, by the rule as it is written down: one bit of the hash of what is compared, in an order of its own."""
    bit = hashlib.sha256("\0".join([source, request, *sorted(marks)]).encode()).digest()[0] % 2
    return sorted(range(2), key=lambda k: marks[k])[bit]


def expected(source, kind, request, candidates, marks, winners, *, ties=False, given=(), by=BY):
    """The columns that a reader adds. ``winners`` are positions, None for a tie."""
    noun = {"image": "pictures", "video": "videos", "audio": "clips"}[kind]
    first = first_by_hand(source, request, marks)
    a, b = ({"type": kind, kind: candidates[k]} for k in (first, 1 - first))
    content = [
        text(ASK.format(noun=noun, request=request, by=by)),
        *given,
        text("\n\nA:\n"),
        a,
        text("\n\nB:\n"),
        b,
    ]
    content.append(text(END.format(noun=noun, tie=TIE if ties else "")))
    letters = {
        head: "C" if w is None else "A" if w == first else "B" for head, w in winners.items()
    }
    label, best = letters["preference"], winners["preference"]
    return {
        "prompt": [{"role": "user", "content": content}],
        "response": f"<answer>{label}</answer>",
        "label": label,
        "data_source": source,
        "request": request,
        "chosen": None if best is None else {"type": kind, kind: candidates[best]},
        "rejected": None if best is None else {"type": kind, kind: candidates[1 - best]},
        "shown": [first, 1 - first],
        **letters,
    }


HPD = {
    "prompt": "a cat",
    "path1": "i/1.jpg",
    "path2": "i/2.jpg",
    "model1": "m",
    "model2": "n",
    "confidence": 0.9,
    "choice_dist": [9, 1],
}
RAPIDATA = {
    "prompt": "rain",
    "file_name1": "x.mp4",
    "file_name2": "y.mp4",
    "weighted_results1_Preference": 0.7,
    "weighted_results2_Preference": 0.3,
    "weighted_results1_Coherence": 0.2,
    "weighted_results2_Coherence": 0.8,
    "weighted_results1_Alignment": 0.5,
    "weighted_results2_Alignment": 0.5,
}
RAPIDATA_WINNERS = {"preference": 0, "coherence": 1, "alignment": None}
OMNI = {
    "prompt": "a boat",
    "response1": None,
    "response2": None,
    "response1_path": "r/1",
    "response2_path": "r/2",
    "criteria": "calm water",
    "criteria_preference": "response2",
    "id": "t2x_1",
    "model1": "m",
    "model2": "n",
}
RANKED = {
    "prompt_id": "p1",
    "prompt": "a tree",
    "classification": "Plants",
    "image_path": ["t/1.webp", "t/2.webp"],
    "rank": [3, 1],
    "overall_rating": [2, 6],
}
RATED = {
    "Index": 4,
    "Prompt": "two dogs",
    "HumanRatings": {"DALLE_3": [5, 4, 5], "SDXL_Base": [5, 5, 4]},
    "DALLE_3": "d.png",
    "SDXL_Base": "s.png",
}
FILMED = {"id": "00012", "prompt": "snow", "models": {"pika": [1, 2], "gen2": [4, 4]}}
BENCH = {
    "path_A": "v/a.mp4",
    "path_B": "v/b.mp4",
    "prompt": "sea",
    "Overall": "B",
    "VQ": "A",
    "MQ": "same",
    "TA": "B",
}
CLIPS = {
    "prompt": "a bell",
    "chosen": {"bytes": None, "path": "c.wav"},
    "rejected": {"bytes": None, "path": "r.wav"},
    "strategy": 1,
}
OVERALL = {"preference": 1, "visual_quality": 0, "motion_quality": None, "text_alignment": 1}
ASSET = {"bytes": None, "path": "start.png"}
STARTS = [text("\n\nThey start from:\n"), {"type": "image", "image": ASSET}]

# reader, row, kind, request, candidates, what they are hashed by, winners, the rest
ROWS = [
    ("hpdv3", HPD, "image", "a cat", ["i/1.jpg", "i/2.jpg"], {"preference": 0}, {}),
    ("imagerewarddb", RANKED, "image", "a tree", ["t/1.webp", "t/2.webp"], {"preference": 1}, {}),
    (
        "genai_bench",
        RATED,
        "image",
        "two dogs",
        ["d.png", "s.png"],
        {"preference": None},
        {"ties": True},
    ),
    (
        "rapidata-t2v",
        RAPIDATA,
        "video",
        "rain",
        ["x.mp4", "y.mp4"],
        RAPIDATA_WINNERS,
        {"ties": True},
    ),
    (
        "rapidata-i2v",
        {**RAPIDATA, "prompt_asset": ASSET},
        "video",
        "rain",
        ["x.mp4", "y.mp4"],
        RAPIDATA_WINNERS,
        {"ties": True, "given": STARTS},
    ),
    (
        "omnirewardbench-t2i",
        OMNI,
        "image",
        "a boat",
        ["r/1", "r/2"],
        {"preference": 1},
        {"ties": True, "by": "calm water"},
    ),
    (
        "omnirewardbench-t2v",
        OMNI,
        "video",
        "a boat",
        ["r/1", "r/2"],
        {"preference": 1},
        {"ties": True, "by": "calm water"},
    ),
    (
        "omnirewardbench-t2a",
        {**OMNI, "response1": "i/1.wav", "criteria_preference": "tie"},
        "audio",
        "a boat",
        ["i/1.wav", "r/2"],
        {"preference": None},
        {"ties": True, "by": "calm water"},
    ),
    (
        "videodpo",
        {"video1": 246, "video2": 251, "frame_caption": "a kite"},
        "video",
        "a kite",
        ["winvideos/000123.mp4", "losevideos/000125.mp4"],
        {"preference": 0},
        {},
    ),
    (
        "videogen-rewardbench",
        BENCH,
        "video",
        "sea",
        ["v/a.mp4", "v/b.mp4"],
        OVERALL,
        {"ties": True},
    ),
    (
        "genai_bench_video",
        FILMED,
        "video",
        "snow",
        ["pika/00012.mp4", "gen2/00012.mp4"],
        {"preference": 1},
        {"ties": True},
    ),
    (
        "audio-alpaca",
        CLIPS,
        "audio",
        "a bell",
        [CLIPS["chosen"], CLIPS["rejected"]],
        {"preference": 0},
        {},
    ),
]
IDS = {"genai_bench": {"id": "4/DALLE_3/SDXL_Base"}, "genai_bench_video": {"id": "00012/pika/gen2"}}


def opened(tmp_path, row, reader, **options):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([row]))
    return open_source(SourceConfig(path=str(path), reader=reader, reader_options=options))[0]


@pytest.mark.parametrize(
    ("reader", "row", "kind", "request_", "candidates", "winners", "rest"),
    ROWS,
    ids=[r[0] for r in ROWS],
)
def test_a_row_of_each_public_layout_becomes_a_question(
    tmp_path, reader, row, kind, request_, candidates, winners, rest
):
    marks = [c if isinstance(c, str) else c["path"] for c in candidates]
    made = expected(reader, kind, request_, candidates, marks, winners, **rest)
    assert opened(tmp_path, row, reader) == {**row, **made, **IDS.get(reader, {})}


def test_thoughts_about_two_pictures_keep_their_order(tmp_path):
    asked = "<image>\n<image>\nWhich picture is better?\nText Caption: [a fox]"
    said = "<think>Image 1 (3/10); Image 2 (9/10)</think>\n<answer>Image 2 is better</answer>"
    row = {
        "images": ["i/1.png", "i/2.png"],
        "conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": said}],
    }
    one, two = ({"type": "image", "image": f"/data/i/{k}.png"} for k in (1, 2))
    words = text("Which picture is better?\nText Caption: [a fox]")
    made = {
        "prompt": [
            {
                "role": "user",
                "content": [words, text("\n\nImage 1:\n"), one, text("\n\nImage 2:\n"), two],
            }
        ],
        "response": said,
        "label": "B",
        "preference": "B",
        "verdict": "Image 2 is better",
        "request": "a fox",
        "shown": [0, 1],
        "chosen": two,
        "rejected": one,
        "data_source": "imagegen-cot-reward-5k",
    }
    assert opened(tmp_path, row, "imagegen-cot-reward-5k", root="/data") == {**row, **made}
    row["conversations"][1]["value"] = "<answer>Neither</answer>"
    with pytest.raises(DataError, match="the last turn has no <answer>Image 1 is better</answer>"):
        opened(tmp_path, row, "imagegen-cot-reward-5k")


def test_the_instruction_can_be_given_for_all_tasks_or_for_each(tmp_path):
    def words(**options):
        return opened(tmp_path, HPD, "hpdv3", **options)["prompt"][0]["content"][0]["text"]

    assert (
        words(task_instruction="Made for {prompt}: {not_a_field}")
        == "Made for a cat: {not_a_field}"
    )
    by_task = {"text-to-image": "See {prompt}", "text-to-video": "Watch {prompt}"}
    assert words(task_instruction=by_task) == "See a cat"
    with pytest.raises(
        DataError, match="task_instruction has no entry 'text-to-image'; it has: text-to-video"
    ):
        words(task_instruction={"text-to-video": "Watch {prompt}"})
    shown = opened(tmp_path, OMNI, "omnirewardbench-t2i", task_instruction="{prompt} by {criteria}")
    assert shown["prompt"][0]["content"][0]["text"] == "a boat by calm water"


def test_paths_are_put_below_the_root_unless_they_have_one(tmp_path):
    found = opened(tmp_path, {**HPD, "path1": "https://a.b/1.jpg"}, "hpdv3", root="/data/hpd")
    assert found["chosen"]["image"] == "https://a.b/1.jpg"
    assert found["rejected"]["image"] == "/data/hpd/i/2.jpg"


@pytest.mark.parametrize(("reader", "row"), [(r[0], r[1]) for r in ROWS], ids=[r[0] for r in ROWS])
def test_the_order_depends_on_the_content_and_tells_nothing_of_the_label(reader, row):
    request_ = next(name for name in ("prompt", "Prompt", "frame_caption") if name in row)
    rng = random.Random(0)
    rows = [{**row, request_: f"request {rng.random()}"} for _ in range(200)]
    found = [READERS[reader](r) for r in rows]
    assert found == [READERS[reader](r) for r in rows]
    firsts = [made["shown"][0] for made in found]
    assert 70 < sum(firsts) < 130
    labels = [made["label"] for made in found]
    assert set(labels) == {"C"} or 70 < labels.count("A") < 130


def test_a_pair_is_shown_alike_in_whatever_order_it_is_listed():
    for k in range(50):
        two = (f"{k}/a.png", f"{k}/b.png")
        assert (
            two[preference_pairs.first_shown("s", "r", two)]
            == two[::-1][preference_pairs.first_shown("s", "r", two[::-1])]
        )


def test_bytes_tell_candidates_apart_and_pictures_in_memory_are_not_decoded():
    class Decoded:
        size = (3, 2)

        def tobytes(self):
            raise AssertionError("decoded")

    orders = {
        preference_pairs.first_shown(
            "s", "r", ({"bytes": bytes([k]), "path": None}, {"bytes": b"b", "path": None})
        )
        for k in range(20)
    }
    assert orders == {0, 1}
    assert preference_pairs.first_shown("s", "r", (Decoded(), Decoded())) in (0, 1)


def test_a_tie_has_neither_side(tmp_path):
    found = opened(tmp_path, {**BENCH, "Overall": "same"}, "videogen-rewardbench")
    assert (found["label"], found["chosen"], found["rejected"]) == ("C", None, None)


def test_what_no_pair_can_be_made_of_is_an_error_that_names_the_row(tmp_path):
    with pytest.raises(DataError, match=r"row 1: reader 'hpdv3' needs column 'path2'"):
        opened(tmp_path, {k: v for k, v in HPD.items() if k != "path2"}, "hpdv3")
    with pytest.raises(DataError, match=r"the column 'MQ' is 'C', not one of A, B, same"):
        opened(tmp_path, {**BENCH, "MQ": "C"}, "videogen-rewardbench")
    with pytest.raises(
        DataError, match=r"criteria_preference is 'both', not one of response1, response2, tie"
    ):
        opened(tmp_path, {**OMNI, "criteria_preference": "both"}, "omnirewardbench-t2a")
    with pytest.raises(
        DataError,
        match=r"it rates 1 models; pairs come from the source lightrft\S+:genai_bench_pairs",
    ):
        opened(tmp_path, {**RATED, "HumanRatings": {"DALLE_3": [1]}}, "genai_bench")
    with pytest.raises(
        DataError,
        match=r"it has one picture; pairs come from the source lightrft\S+:imagerewarddb_pairs",
    ):
        opened(tmp_path, {**RANKED, "image_path": "t/1.webp", "rank": 1}, "imagerewarddb")


def source_of(function, path, reader):
    name = f"{function.__module__}:{function.__name__}"
    return open_source(SourceConfig(path=name, options={"path": str(path)}, reader=reader))


def test_pictures_of_one_prompt_are_paired_unless_their_ranks_are_equal(tmp_path):
    ranks = {"p1": [1, 2, 2], "p2": [1], "p3": [None, 1]}
    rows = [
        {
            "prompt_id": p,
            "prompt": p,
            "classification": "c",
            "image_path": f"{p}/{k}.webp",
            "rank": rank,
            "overall_rating": 9 - k,
        }
        for p, of_prompt in ranks.items()
        for k, rank in enumerate(of_prompt)
    ]
    random.Random(0).shuffle(rows)
    (tmp_path / "train.json").write_text(json.dumps(rows))
    found = source_of(
        image_preferences.imagerewarddb_pairs, tmp_path / "train.json", "imagerewarddb"
    )
    made = [found[i] for i in range(len(found))]
    assert sorted((m["chosen"]["image"], m["rejected"]["image"]) for m in made) == [
        ("p1/0.webp", "p1/1.webp"),
        ("p1/0.webp", "p1/2.webp"),
    ]
    assert made[0]["prompt_id"] == "p1"
    assert sorted(made[0]["rank"]) == [1, 2]


def test_models_of_one_prompt_are_paired(tmp_path):
    row = {
        **RATED,
        "HumanRatings": {"one": [5], "two": [3], "three": [1], "unseen": [4]},
        "one": "1.png",
        "two": "2.png",
        "three": "3.png",
    }
    (tmp_path / "train.json").write_text(json.dumps([row]))
    found = source_of(image_preferences.genai_bench_pairs, tmp_path / "train.json", "genai_bench")
    made = [found[i] for i in range(len(found))]
    assert [m["id"] for m in made] == ["4/one/two", "4/one/three", "4/two/three"]
    assert [(m["chosen"]["image"], m["rejected"]["image"]) for m in made] == [
        ("1.png", "2.png"),
        ("1.png", "3.png"),
        ("2.png", "3.png"),
    ]
    assert "three" not in made[0]


def test_videos_of_one_prompt_are_paired(tmp_path):
    rows = {"00012": {"prompt": "snow", "models": {"pika": [1, 2], "gen2": [4, 4], "lost": []}}}
    (tmp_path / "genai_video.json").write_text(json.dumps(rows))
    found = source_of(
        media_preferences.genai_bench_video_pairs,
        tmp_path / "genai_video.json",
        "genai_bench_video",
    )
    assert [found[i]["id"] for i in range(len(found))] == ["00012/pika/gen2"]
    with pytest.raises(DataError, match="cannot be read as JSON"):
        source_of(
            media_preferences.genai_bench_video_pairs,
            tmp_path / "missing.json",
            "genai_bench_video",
        )


def test_pairs_and_questions_are_encoded_with_their_media(tmp_path):
    """Through the tokenizer and processor of a real family: features of both candidates, in the order of the prompt."""
    model = ModelConfig(path=str(tmp_path / "model"))
    save_tiny_media("qwen2_5_vl", tmp_path / "model")
    tokenizer = load_tokenizer(model)
    processor = load_processor(model, tokenizer)
    for name, size in (("1.png", (32, 48)), ("2.png", (48, 32)), ("start.png", (32, 32))):
        Image.new("RGB", size, "red").save(tmp_path / name)
    Image.new("RGB", (56, 56)).save(
        tmp_path / "v.webp", save_all=True, append_images=[Image.new("RGB", (56, 56), "blue")]
    )
    videos = {"file_name1": "v.webp", "file_name2": "v.webp", "prompt_asset": "start.png"}
    rows = {
        "hpdv3": ({**HPD, "path1": "1.png", "path2": "2.png"}, {"image_grid_thw": 2}),
        "rapidata-i2v": ({**RAPIDATA, **videos}, {"image_grid_thw": 1, "video_grid_thw": 2}),
        "geo3k": (
            {"images": ["1.png"], "problem": "<image>Find x.", "answer": "3"},
            {"image_grid_thw": 1},
        ),
        "mathvista": (
            {
                "question": "?",
                "image": "2.png",
                "choices": ["a"],
                "answer": "a",
                "question_type": "multi_choice",
            },
            {"image_grid_thw": 1},
        ),
    }
    for reader, (row, counts) in rows.items():
        (tmp_path / f"{reader}.json").write_text(json.dumps([row]))
        data = DataConfig(sources=({"path": str(tmp_path / f"{reader}.json"), "reader": reader},))
        prompt = PromptDataset(data, tokenizer, seed=0, processor=processor)[0]
        assert {
            name: len(ragged.values) for name, ragged in prompt.media.items() if name in counts
        } == counts
        if reader == "hpdv3":  # the preferred picture is the narrower one
            widths = prompt.media["image_grid_thw"].values[:, 2].tolist()
            assert widths == sorted(widths, reverse=prompt.label == "B")
            assert len(set(widths)) == 2
