import io
import json
import re
import shutil
import wave
from html.parser import HTMLParser
from importlib.resources import files

import pytest
from PIL import Image

import lightrft
from lightrft.diagnostics.rescoring import saved_rollouts
from lightrft.observability.run_directory import RunDirectory
from lightrft.rewards.rules.answers import extracted
from lightrft.types import Prompt, Rollout
from lightrft.utils.errors import DataError
from lightrft.viewer.groups import Rules
from lightrft.viewer.report import duration, write_report
from tests.unit.viewer.browser import browse, needs_browser
from tests.unit.viewer.runs import HOSTILE, Config, make_run


class Page(HTMLParser):
    """Tags with their attributes, and the text that a reader sees."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text, self._open = [], "", []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag):
        if tag in self._open:
            while self._open.pop() != tag:
                pass

    def handle_data(self, data):
        if not {"style", "script", "title"} & set(self._open):
            self.text += data

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


def page_of(path):
    return Page(write_report(path).read_text(encoding="utf-8"))


def test_the_report_tells_the_whole_run(tmp_path):
    text = page_of(make_run(tmp_path / "demo")).text
    for part in (
        "41.2%",
        "96.8%",
        "+55.6 points",
        "3 min 42 s",
        "60",
        "after 30 supervised",
        "9,000",
        "1,500",
    ):
        assert part in text
    for title in (
        "Reward",
        "Held-out accuracy",
        "Response length",
        "KL to the reference",
        "Entropy",
        "Where the time goes",
    ):
        assert title in text
    assert "generate 60%" in text
    assert "6,000 tokens sampled every one accounted for" in text
    assert text.count("✗ wrong") == text.count("✓ right") == 5
    assert "first 5 of 7" in text
    assert "optimizer.lr0.5" in text
    assert "lightrft explain grpo" in text


def test_every_plot_has_words_for_those_who_cannot_see_it(tmp_path):
    page = page_of(make_run(tmp_path / "demo"))
    plots = [box for box in page.all("div") if box.get("class") == "plot"]
    assert len(plots) >= 8
    assert all(box["role"] == "img" and len(box["aria-label"]) > 30 for box in plots)
    assert len(page.all("noscript")) == len(plots)
    assert all(box["aria-label"] in page.text for box in plots)
    assert page.all("html") == [{"lang": "en"}]
    assert len(page.all("h1")) == 1


def test_nothing_is_asked_of_the_outside(tmp_path):
    html = write_report(make_run(tmp_path / "demo")).read_text(encoding="utf-8")
    page = Page(html)
    assert "default-src 'none'" in page.all("meta")[1]["content"]
    assert page.all("link") == [{"rel": "icon", "href": "data:,"}]
    assert not [a for _, a in page.tags if "src" in a or "srcset" in a or "style" in a]
    # The address in uPlot's own notice is a comment.
    html = html.replace("/*! https://github.com/leeoniya/uPlot", "")
    assert not re.search(r"url\(|@import|https?://", html)


def test_the_page_carries_the_licence_of_uplot(tmp_path):
    html = write_report(make_run(tmp_path / "demo")).read_text(encoding="utf-8")
    licence = files("lightrft.viewer").joinpath("vendor/uplot/LICENSE").read_text(encoding="utf-8")
    assert "Permission is hereby granted" in licence
    assert licence in html


def test_hostile_text_stays_text(tmp_path):
    page = page_of(make_run(tmp_path / "demo", HOSTILE, Config(name=HOSTILE)))
    kinds = [script.get("type", "code") for script in page.all("script")]
    assert kinds == ["application/json", "code", "code", "code"]
    assert not page.all("img")
    assert not [a for _, a in page.tags for name in a if name.startswith("on")]
    # Prompts, answers, commands and the settings (changed and all: quoted)
    assert page.text.count(HOSTILE) == 5 + 10 + 3 + 1


def test_lost_tokens_are_said(tmp_path):
    with RunDirectory.open(tmp_path / "a", Config(), resume="auto", overwrite=False) as folder:
        folder.log({"step": 1, "rollout/tokens_sampled": 100, "rollout/tokens_trained": 90})
    assert "10 not accounted for" in page_of(tmp_path / "a").text


@pytest.mark.parametrize(
    "row",
    [
        None,
        {"step": 1, "reward/mean": 0.5},
        {"step": 1, "reward/mean": None, "loss": None},
        {"phase": "sft", "step": 1, "loss": 0.5, "eval/accuracy": 0.5},
        {"step": 1, "time/generate": 0.0, "rollout/tokens_sampled": 0},
        {"step": 0, "eval/accuracy": 0},
        {"step": 1, "reward/mean": 1e308, "time/generate": 5e-324},
    ],
)
def test_a_run_that_has_little_is_shown_all_the_same(tmp_path, row):
    with RunDirectory.open(tmp_path / "a", Config(), resume="auto", overwrite=False) as folder:
        if row:
            folder.log(row)
    text = page_of(tmp_path / "a").text
    assert "Not finished" in text if row else "No step has been written yet" in text


def test_a_run_that_was_stopped_is_not_called_finished(tmp_path):
    make_run(tmp_path / "a")
    summary = json.loads((tmp_path / "a/summary.json").read_text())
    assert "Finished" in page_of(tmp_path / "a").text
    (tmp_path / "a/summary.json").write_text(json.dumps({**summary, "finished": False}))
    text = page_of(tmp_path / "a").text
    assert "Not finished: these are the numbers up to step" in text and "Finished" not in text


def test_values_that_are_not_finite_are_left_out(tmp_path):
    make_run(tmp_path / "a")
    row = '{"step": %d, "phase": "rl", "reward/mean": %s, "loss": NaN, "time/generate": Infinity}\n'
    values = ["NaN", "Infinity", "0.25", "-Infinity", "1e308", "1e308"]
    rows = [row % (step, value) for step, value in enumerate(values, 1)]
    (tmp_path / "a/metrics.jsonl").write_text("".join(rows))
    (tmp_path / "a/summary.json").write_text('{"heldout_before": NaN}')
    html = write_report(tmp_path / "a").read_text(encoding="utf-8")
    data = re.search(r'id="plot-data">(.*?)</script>', html)
    (plot,) = json.loads(data[1], parse_constant=pytest.fail)
    assert plot["steps"] == [3, 5, 6]
    assert plot["series"][0]["values"] == [0.25, 1e308, 1e308]


def test_without_samples_the_sampled_answers_are_shown(tmp_path):
    with RunDirectory.open(tmp_path / "a", Config(), resume="auto", overwrite=False) as folder:
        for step in (1, 2):
            prompts = [
                Prompt(id=f"{step}.{i}", token_ids=[1], text=f"ask {step}.{i}", label=5)
                for i in range(2)
            ]
            folder.write_rollouts(
                step,
                [
                    Rollout(
                        p,
                        [1],
                        [True],
                        [-0.5],
                        [0],
                        "stop",
                        0,
                        text=f"say {p.id}",
                        reward=0.25 * step,
                    )
                    for p in prompts
                    for _ in "ab"
                ],
            )
    text = page_of(tmp_path / "a").text.partition("Groups and advantages")[0]
    assert text.count("say 1.0") == 1
    assert text.count("say 2.1") == 1
    assert "reward 0.5" in text


def test_what_is_not_a_run_is_refused(tmp_path):
    with pytest.raises(DataError, match="not a run's folder"):
        write_report(tmp_path)
    make_run(tmp_path / "a")
    (tmp_path / "a/summary.json").write_text("{")
    with pytest.raises(DataError, match=r"summary\.json is not JSON"):
        write_report(tmp_path / "a")


def test_durations_read_well():
    assert [duration(s) for s in (1.25, 42, 222, 7500)] == [
        "1.2 s",
        "42 s",
        "3 min 42 s",
        "2 h 5 min",
    ]


def write_media(folder):
    """Two pictures, one of them tiny, and a clip of half a second; their names."""
    folder.mkdir()
    for name, side in (("tiny.png", 8), ("large.jpg", 200)):
        Image.new("RGB", (side, side), (30, 90, 200)).save(folder / name)
    sound = io.BytesIO()
    with wave.open(sound, "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(b"\0\1" * 4000)
    (folder / "clip.wav").write_bytes(sound.getvalue())
    return ["tiny.png", "large.jpg", "clip.wav"]


def run_with_media(path, text="7", names=None):
    """Answers of one word or long ones, about one file each; every fourth stays wrong."""
    with RunDirectory.open(path, Config(), resume="auto", overwrite=False) as folder:
        names = names or write_media(path / "media")
        rows = [
            {
                "prompt": "Which digit?",
                "label": "7",
                "attachments": [names[i % len(names)]],
                "correct": False,
            }
            for i in range(12)
        ]
        folder.write_samples(
            [{**row, "text": "3"} for row in rows],
            [{**row, "text": text, "correct": i % 4 > 0} for i, row in enumerate(rows)],
        )
    return path


def test_short_answers_about_pictures_and_clips_stand_beside_them_and_wrong_ones_are_marked(
    tmp_path,
):
    page = page_of(run_with_media(tmp_path / "a"))
    assert page.text.count("Which digit?") == 1
    assert (
        "Of these 12 prompts of the eval set, 0 had a right response before, 9 after." in page.text
    )
    assert (
        len([1 for attrs in page.all("li") if attrs.get("class") == "card wrong"])
        == page.text.count("✗ 7")
        == 3
    )
    assert page.text.count("✓ 7") == 9
    assert [bool(i.get("class")) for i in page.all("img")] == [True, False] * 4
    assert all(
        i["src"].startswith("data:image/") and i["alt"] == "expected 7" for i in page.all("img")
    )
    assert len(page.all("audio")) == 4
    assert all(a["src"].startswith("data:audio/wav;base64,") for a in page.all("audio"))


def test_long_answers_about_a_picture_are_shown_in_full_beside_it(tmp_path):
    page = page_of(run_with_media(tmp_path / "a", text="It looks like a seven.\n" * 3))
    assert len(page.all("img")) + len(page.all("audio")) == 5
    assert page.text.count("It looks like a seven.") == 15
    assert page.text.count("✗ wrong") == 5 + 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gone.png", "gone.png is missing"),
        ("a.svg", "a.svg cannot be shown"),
        ("../media/tiny.png", "cannot be shown"),
    ],
)
def test_a_file_that_cannot_be_shown_is_named(tmp_path, name, said):
    page = page_of(run_with_media(tmp_path / "a", names=[name]))
    assert not page.all("img")
    assert said.replace("cannot be shown", "") in page.text


def luminance(color):
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_stand_out_enough(scheme):
    """WCAG 2.2: text at least 4.5 to 1 (success criterion 1.4.3), lines and bars 3 to 1 (1.4.11)."""
    css = files("lightrft.viewer").joinpath("report.css").read_text(encoding="utf-8")
    palette = dict(
        re.findall(r"--([\w-]+): (#\w{6});", css.split("prefers-color-scheme: dark")[scheme])
    )

    def contrast(a, b):
        low, high = sorted([luminance(palette[a]), luminance(palette[b])])
        return (high + 0.05) / (low + 0.05)

    for ground in ("bg", "card", "soft", "bad-bg"):
        for text in ("ink", "muted", "good", "bad", "accent"):
            assert contrast(text, ground) >= 4.5, (text, ground)
    for i in range(8):
        assert contrast(f"s{i}", "card") >= 3


@needs_browser
def test_a_real_browser_shows_it_without_a_complaint_at_any_width(tmp_path):
    report = write_report(make_run(tmp_path / "demo", HOSTILE, Config(name=HOSTILE)))
    (tmp_path / "frames.html").write_text(
        "<body>"
        + "".join(
            f'<iframe width={width} height=900 src="demo/report.html" onload="this.title = '
            "['ran ' + !this.contentDocument.querySelector('.command button').hidden, "
            "'wide ' + this.contentDocument.documentElement.scrollWidth, "
            "'plot ' + Math.round(this.contentDocument.querySelector('.plot canvas').getBoundingClientRect().width), "
            "this.contentDocument.title].join('; ')\"></iframe>"
            for width in (320, 375, 1280)
        )
    )
    dom, console = browse(tmp_path / "frames.html", tmp_path / "profile")
    # An outside request or a script that is not ours would be refused aloud by the page's own policy.
    assert console == []
    titles = re.findall(r'title="(ran[^"]*)"', dom)
    assert len(titles) == 3
    for title, width in zip(titles, (320, 375, 1280)):
        ran, wide, plot, name = title.split("; ")
        assert ran == "ran true"
        assert int(wide.split()[1]) <= width
        assert int(plot.split()[1]) > 240
        assert name == "demo: run report"
    assert report.stat().st_size < 2**20


@needs_browser
@pytest.mark.parametrize("text", ["7", "It looks like a seven.\n" * 3], ids=["short", "long"])
def test_a_real_browser_shows_the_pictures_and_can_play_the_clips(tmp_path, text):
    write_report(run_with_media(tmp_path / "demo", text))
    shutil.rmtree(tmp_path / "demo" / "media")  # the page holds all that it shows
    (tmp_path / "frame.html").write_text(
        """<body><iframe width=375 height=900 src="demo/report.html" onload="
        const page = this.contentDocument, tell = (say) => this.title = 'saw ' + say;
        const waiting = setInterval(() => {
          const sounds = [...page.querySelectorAll('audio')];
          if (sounds.some((a) => !(a.duration > 0) && !a.error)) return;
          clearInterval(waiting);
          tell([[...page.querySelectorAll('img')].map((i) => i.naturalWidth).join(' '),
            sounds.map((a) => a.duration).join(' '), page.documentElement.scrollWidth].join('; '));
        }, 20)"></iframe>"""
    )
    dom, console = browse(tmp_path / "frame.html", tmp_path / "profile")
    assert console == []
    seen = re.search(r'title="saw ([\d. ]+); ([\d. ]+); (\d+)"', dom)
    assert seen, dom[-500:]
    assert seen[1].split() == (["8", "200"] * 4 if text == "7" else ["8", "200"] * 2)
    assert set(seen[2].split()) == {"0.5"}
    assert int(seen[3]) <= 375


@needs_browser
def test_the_browser_would_have_complained(tmp_path):
    """The check above can fail: a script and a picture from elsewhere, put into the page, are refused aloud."""
    report = write_report(make_run(tmp_path / "demo"))
    html = report.read_text(encoding="utf-8")
    report.write_text(
        html.replace(
            "</main>",
            "<img src='https://example.invalid/x.png'><script>document.title='owned'</script></main>",
        )
    )
    dom, console = browse(report, tmp_path / "profile")
    assert len(console) >= 2
    assert "<title>owned" not in dom


def with_groups(folder, steps=3, groups=2):
    """A run with ``steps`` files of ``groups`` groups of two responses."""
    run = RunDirectory.open(folder, Config(), resume="auto", overwrite=False)
    for step in range(1, steps + 1):
        rollouts = []
        for g in range(groups):
            prompt = Prompt(id=f"{step}-{g}", token_ids=[1], text=f"<b>ask {g}</b>", label="7")
            for reward in (0.0, 1.0):
                rollouts.append(
                    Rollout(
                        prompt,
                        [5, 6, 7],
                        [True, False, True],
                        [-1.0] * 3,
                        [0] * 3,
                        "stop",
                        0,
                        text=f"says {step} {reward}",
                        reward=reward,
                    )
                )
        run.write_rollouts(
            step,
            rollouts,
            advantages=[[4 * r.reward - 1, 99.0, 4 * r.reward - 3] for r in rollouts],
        )
        run.log({"step": step, "phase": "rl", "reward/mean": 0.5})
    run.close()
    return folder


def test_the_groups_of_a_step_are_shown_with_rewards_and_advantages_of_what_was_sampled(tmp_path):
    from lightrft.viewer.groups import read_steps

    first, *_, last = read_steps(with_groups(tmp_path / "a"), Rules())
    assert (first.step, last.step, first.count) == (1, 3, 2)
    responses = first.groups[0].responses
    assert [(r.reward, r.advantage, r.tokens, r.ended) for r in responses] == [
        (0.0, -2.0, 3, "stop"),
        (1.0, 2.0, 3, "stop"),
    ]
    page = write_report(tmp_path / "a").read_text()
    assert "Groups and advantages" in page and "Step 2" in page
    assert '<td class="bad">−2</td>' in page or '<td class="bad">-2</td>' in page
    assert "says 3 1.0" in page and "&lt;b&gt;ask 1&lt;/b&gt;" in page and "<b>ask" not in page


def test_the_groups_show_what_a_rule_reads_from_each_response_and_of_other_functions_nothing(
    tmp_path,
):
    folder = with_groups(tmp_path / "a", steps=1)
    assert " reads</th>" not in write_report(folder, extracted).read_text()
    (folder / "config.yaml").write_text(
        "reward:\n  terms:\n  - {function: math, name: sum, options: {last_number: true}}\n"
        "  - {function: own.py:f}\n"
    )
    page = write_report(folder, extracted).read_text()
    assert "<th>sum reads</th><th>response</th>" in page and "own.py:f reads" not in page
    assert "<td><code>1.0</code></td><td><pre>says 1 1.0" in page
    file = folder / "rollouts" / "step_000001.jsonl"
    file.write_text(file.read_text().replace("says 1 1.0", "no idea"))
    assert "<td>nothing</td><td><pre>no idea" in write_report(folder, extracted).read_text()
    (folder / "config.yaml").write_text("reward: {terms: [3]}\n")
    assert " reads</th>" not in write_report(folder, extracted).read_text()


def test_of_many_steps_and_groups_some_are_shown_and_it_is_said_of_how_many(tmp_path):
    from lightrft.viewer.groups import GROUPS, STEPS, read_steps

    steps = read_steps(with_groups(tmp_path / "a", steps=40, groups=9), Rules())
    assert len(steps) == STEPS and (steps[0].step, steps[-1].step) == (1, 40)
    assert all(len(step.groups) == GROUPS and step.count == 9 for step in steps)
    assert f"({GROUPS} of 9 groups)" in write_report(tmp_path / "a").read_text()


def test_a_run_without_rollouts_has_no_groups_and_a_file_that_holds_none_is_named(tmp_path):
    folder = with_groups(tmp_path / "a", steps=1)
    (folder / "rollouts" / "step_000001.jsonl").write_text('{"no": "prompt"}\n')
    with pytest.raises(DataError, match=r"step_000001\.jsonl, line 1: not a rollout"):
        write_report(folder)
    (folder / "rollouts" / "step_000001.jsonl").unlink()
    assert "Groups and advantages" not in write_report(folder).read_text()


def test_a_tile_and_the_curve_of_the_same_metric_give_the_same_number(tmp_path):
    with RunDirectory.open(tmp_path / "run", Config(), resume="auto", overwrite=False) as folder:
        for step in range(1, 41):
            row = {
                "tokens_per_second": 1000.0 + 10 * step,
                "reward/mean": step / 100,
                "response/length": 100.0 + step,
            }
            folder.log({"phase": "rl", "step": step, **row})
    html = write_report(tmp_path / "run").read_text(encoding="utf-8")
    for label, title, value in (
        ("Tokens per second", "Tokens per second", "1,385"),
        ("Reward", "Reward", "0.385"),
        ("Response length", "Response length", "138"),
    ):
        assert f"<dt>{label}</dt><dd>{value}" in html, html[html.index(f"<dt>{label}") :][:80]
        assert f'<span class="now">{value}</span><h3>{title}</h3>' in html


@pytest.mark.parametrize(
    ("step", "label"), [(0, "Held-out accuracy, before training"), (9, "Held-out accuracy")]
)
def test_a_single_evaluation_is_not_shown_as_before_and_after(tmp_path, step, label):
    with RunDirectory.open(tmp_path / "run", Config(), resume="auto", overwrite=False) as folder:
        folder.log({"phase": "rl", "step": step, "eval/accuracy": 0.024})
        folder.write_summary(
            {
                "heldout_before" if step == 0 else "heldout_after": 0.024,
                "steps": step,
                "seconds": 1.0,
            }
        )
    html = write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert f'<p class="label">{label}</p>' in html and 'class="from"' not in html and "2.4%" in html


@pytest.mark.parametrize("line", ['{"no": "prompt"}', "garbage", "[1]", '{"prompt": "text"}', ""])
@pytest.mark.parametrize(
    "read",
    [write_report, lambda folder: lightrft.Run(folder).rollouts(), saved_rollouts],
    ids=["report", "Run", "check"],
)
def test_whatever_reads_rollouts_names_a_line_that_is_none(tmp_path, read, line):
    folder = with_groups(tmp_path / "a", steps=2)
    read(folder)
    last = folder / "rollouts" / "step_000002.jsonl"
    count = len(last.read_text().splitlines())
    with last.open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(DataError, match=rf"step_000002\.jsonl, line {count + 1}: not a rollout"):
        read(folder)
