"""The plots of a report in a real browser, which plots.js draws."""

import pytest

from lightrft.observability.run_directory import RunDirectory
from lightrft.viewer.plots import compact
from lightrft.viewer.report import write_report
from tests.unit.viewer.browser import drive, needs_browser
from tests.unit.viewer.runs import Config, make_run

INK = """
  const ink = [...page.querySelectorAll("figure")].map((f) => [
    f.querySelector("h3").textContent,
    [0, 1, 2, 3, 4, 5, 6, 7].map((i) => inked(f.querySelector("canvas"), `--s${i}`)),
    inked(f.querySelector("canvas"), "--muted"),
  ]);
"""

USE = """
  const numberOf = (title) => figure(title).querySelector(".now").textContent;
  const latest = numberOf("Entropy");
  const reward = await hover("Reward", 0.5);
  const pointed = numberOf("Entropy");
  const quiet = figure("Entropy").querySelector(".tip").hidden;
  mouse(over("Reward"), "mouseleave", 0.5);
  await pause();
  const left = numberOf("Entropy");
  const time = await hover("Where the time goes", 0.001);
  mouse(over("Where the time goes"), "mouseleave", 0.001);
  const pointer = { latest, reward, pointed, quiet, left, time };

  const click = async (title, i) => {
    const key = figure(title).querySelectorAll(".key")[i];
    key.click();
    await pause();
    return [key.getAttribute("aria-pressed"), key.disabled];
  };
  const of = (title, i) => inked(figure(title).querySelector("canvas"), `--s${i}`);
  const both = () => [of("Reward", 0), of("Where the time goes", 1)];
  const before = both();
  const hidden = [await click("Reward", 0), await click("Where the time goes", 1)];
  const without = both();
  const stack = await hover("Where the time goes", 0.5);
  mouse(over("Where the time goes"), "mouseleave", 0.5);
  const shown = [await click("Reward", 0), await click("Where the time goes", 1)];
  const legend = { before, hidden, without, stack, shown, again: both() };

  const ends = async () => {
    const heads = [];
    for (const title of ["Reward", "Entropy", "Warm-up loss"]) {
      heads.push((await hover(title, 0.001))[0][0], (await hover(title, 0.999))[0][0]);
      mouse(over(title), "mouseleave", 0.999);
    }
    return heads;
  };
  const whole = await ends();
  mouse(over("Reward"), "mouseenter", 0.4);
  mouse(over("Reward"), "mousemove", 0.4);
  mouse(over("Reward"), "mousedown", 0.4);
  mouse(over("Reward"), "mousemove", 0.6);
  mouse(over("Reward"), "mouseup", 0.6);
  await pause();
  const zoomed = await ends();
  mouse(over("Entropy"), "dblclick", 0.5);
  await pause();
  const zoom = { whole, zoomed, end: await ends() };

  const widths = [];
  for (const width of [700, 340, 1000]) {
    target.width = width;
    const [box, canvas] = [".plot", "canvas"].map((name) => figure("Reward").querySelector(name));
    const wide = (element) => Math.round(element.getBoundingClientRect().width);
    for (let i = 0; i < 100 && wide(box) !== wide(canvas); i += 1) await frames();
    widths.push([wide(box), wide(canvas)]);
  }
"""


@pytest.fixture(scope="module")
def used(tmp_path_factory):
    """What a browser showed of one report, while a pointer and the legends were used."""
    report = write_report(make_run(tmp_path_factory.mktemp("used") / "demo"))
    return drive(report, INK + USE + "return { ink, pointer, legend, zoom, widths };")


def check_ink(plots):
    assert len(plots) == 8
    for title, lines, ticks in plots:
        assert max(lines) > 150, title
        assert ticks > 20, title


@needs_browser
def test_every_plot_has_ink_in_the_colors_of_its_lines(used):
    check_ink(used["ink"])
    lines = {
        title: [i for i, count in enumerate(ink) if count > 50] for title, ink, _ in used["ink"]
    }
    assert lines["Reward"] == [0, 1, 2]
    assert lines["Held-out accuracy"] == [2, 5]
    assert lines["Where the time goes"] == [0, 1, 2]


@needs_browser
def test_every_plot_has_ink_in_dark_colors_on_a_dark_page(tmp_path):
    report = write_report(make_run(tmp_path / "demo"))
    script = INK + 'return [view.matchMedia("(prefers-color-scheme: dark)").matches, ink];'
    dark, ink = drive(report, script, "--blink-settings=preferredColorScheme=0")
    assert dark
    check_ink(ink)


@needs_browser
def test_the_pointer_shows_the_values_of_its_step_in_every_plot(used):
    pointer = used["pointer"]
    # The middle of the steps 1 to 60 is step 30 or 31.
    (head, reward, *terms), now = pointer["reward"]
    assert head in ("step 30", "step 31")
    assert reward.startswith("reward, smoothed: ")
    assert 0.55 < float(reward.partition(": ")[2]) < 0.65
    assert [term.partition(":")[0] for term in terms] == ["correct", "format"]
    assert reward.endswith(now)
    assert pointer["quiet"]
    assert pointer["pointed"] != pointer["latest"] == pointer["left"]
    assert pointer["time"] == [
        ["steps 1 to 2, mean", "other: 0.1 s", "update: 0.7 s", "generate: 1.2 s"],
        "2 s",
    ]


@needs_browser
def test_a_name_in_the_legend_hides_its_line(used):
    legend = used["legend"]
    assert legend["hidden"] == [["false", False]] * 2
    assert max(legend["without"]) < 20 < min(legend["before"])
    (_, *rows), now = legend["stack"]
    assert rows == ["other: 0.1 s", "generate: 1.2 s"]
    assert now == "1.3 s"
    assert legend["shown"] == [["true", False]] * 2
    assert legend["again"] == legend["before"]


@needs_browser
def test_a_drag_zooms_every_plot_of_the_axis_and_a_double_click_ends_it(used):
    zoom = used["zoom"]
    every = ["step 1", "step 60"] * 2 + ["supervised step 1", "supervised step 30"]
    assert zoom["whole"] == zoom["end"] == every
    low, high = (int(head.split()[1]) for head in zoom["zoomed"][:2])
    assert 23 <= low <= 26
    assert 35 <= high <= 38
    assert zoom["zoomed"][2:4] == zoom["zoomed"][:2]
    assert zoom["zoomed"][4:] == every[4:]


@needs_browser
def test_a_plot_follows_the_width_of_the_page(used):
    assert all(box == canvas for box, canvas in used["widths"])
    assert len({canvas for _, canvas in used["widths"]}) == 3


@needs_browser
def test_numbers_have_the_form_of_the_page_and_extreme_values_are_drawn(tmp_path):
    values = [0, 0.5, 0.00012, 3e-6, -0.25, 1.2345, 999.4, 1234, 9999, 12_400, 999_600, 3.45e9, 0.1]
    columns = {
        "policy/kl": [1e308, -1e308],
        "policy/entropy": [5e-324, 1e-323],
        "policy/grad_norm": [1e15, 1e15 + 1],
        "response/length": [0.0, 0.0],
        "reward/mean": [None, 0.5],
        "time/generate": [0.0, 5e-324],
    }
    with RunDirectory.open(tmp_path / "run", Config(), resume="auto", overwrite=False) as folder:
        for step, value in enumerate(values):
            extreme = {name: column[step] for name, column in columns.items() if step < 2}
            folder.log({"phase": "rl", "step": step, "policy/loss": value, **extreme})
    last = len(values) - 1
    script = f"""
      const rows = [];
      for (let i = 0; i <= {last}; i += 1) rows.push((await hover("Policy loss", i / {last}))[0][1]);
      return {{ rows, ink }};
    """
    told = drive(write_report(tmp_path / "run"), INK + script)
    assert told["rows"] == [f"policy loss: {compact(value)}" for value in values]
    assert len(told["ink"]) == len(columns) + 1
    assert all(ticks > 5 for _, _, ticks in told["ink"]), told["ink"]
