import base64
import json
import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from telemetry_samples import (
    BASELINE,
    T0,
    WINNER,
    confirm_trials,
    failed_trial,
    gain,
    history,
    measurement,
    profile,
    promoted,
    promotion,
    record,
    search_trials,
    steady,
    trial,
    tuning,
)

from tunewright.domain.answers import Answer
from tunewright.domain.candidate import Candidate
from tunewright.domain.load import LoadFile
from tunewright.domain.measurement import Estimate
from tunewright.domain.phases import Phase
from tunewright.domain.profile import Histogram
from tunewright.domain.state import ConfirmStatus, Decision, Finalist, Gain, TrialPhase
from tunewright.telemetry.facts import SpareTime
from tunewright.telemetry.report import render_report, report_data
from tunewright.telemetry.report.charts import (
    LETTERS,
    Point,
    Step,
    histogram_chart,
    interval_chart,
    ladder_chart,
    progress_chart,
    time_chart,
)
from tunewright.telemetry.report.style import STYLE

VOID = {"meta", "link", "br", "hr", "img"}
SECTIONS = [
    "answer", "change", "ladder", "cost", "apply", "trials", "inputs", "rounds", "tradeoff", "latency", "traffic",
    "noise", "failures", "spare", "promotion", "decisions", "phases",
]  # fmt: skip


class Page(HTMLParser):
    """Well-formed or refused; keeps what the tests ask for."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.ids, self.words = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        assert len(attributes) == len(attrs), f"<{tag}> has an attribute twice: {attrs}"
        self.tags.append((tag, attributes))
        if "id" in attributes:
            self.ids.append(attributes["id"])
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    def data(self):
        links = [a["href"] for tag, a in self.tags if tag == "a" and "download" in a]
        assert len(links) == 1
        return json.loads(base64.b64decode(links[0].removeprefix("data:application/json;base64,")))


def page(held, trials, **more):
    text = render_report(held, trials, **more)
    found = Page(text)
    assert len(found.ids) == len(set(found.ids))
    assert [a["id"] for tag, a in found.tags if tag == "section"] == SECTIONS
    return found


def test_the_answer_comes_first_and_says_what_how_much_how_sure_and_at_what_risk():
    found = page(*promoted())
    start = found.text.index("The answer", found.text.index("Phases"))
    text = found.text[start : found.text.index("What changes", start)]
    for fact in (
        "Promoted",
        "+58.4% with enable_prefix_caching false → true, max_num_batched_tokens default → 8192, max_num_seqs 64 → 256",
        "+52.1% to +64.9%, settled: better",
        "3 fresh starts of each side",
        "simulated, mean of 3 runs",
        "the SLO holds with 23% to spare (4 runs)",
        "they say nothing about a real GPU",
        "Production was saturated",
    ):
        assert fact in text, fact


def test_every_part_of_a_whole_tuning_is_there():
    text = page(*promoted()).text
    for fact in (
        "max-num-seqs: 256",
        "max-num-seqs: 64",
        "Failures by kind",
        "torch.OutOfMemoryError: CUDA out of memory",
        "the standard deviation is",
        "starting 19 min 40 s, warming 3 min 12 s",
        "1,595 ± 31.9",
        "TTFT, SLO",
        "closed loop of 64 streams",
        "at least 1.2 requests/s",
        "240 ms against 310 ms",
        "0.24 (180 samples)",
        "looks right",
        "sam",
        "What happened in Canary.",
        "one counter reset on replica 2",
    ):
        assert fact in text, fact


def test_the_data_behind_the_page_are_in_it():
    held, trials = promoted()
    data = page(held, trials).data()
    assert data == json.loads(json.dumps(report_data(held, trials)))
    assert data["format"] == "tunewright.dev/report/v1alpha1"
    assert data["summary"]["gain"]["estimate"] == {"value": 0.584, "low": 0.521, "high": 0.649}
    assert data["summary"]["baselineObjective"] == 1000
    assert data["summary"]["spareSeconds"]["measuring"] == 16 * 35
    assert len(data["trials"]) == len(trials)
    assert data["record"]["tuning"]["spec"]["slo"]["ttftP95"] == "500ms"


def test_nothing_is_fetched_from_elsewhere_and_no_script_runs():
    found = page(*promoted())
    policy = next(a["content"] for tag, a in found.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    for tag, attributes in found.tags:
        assert tag not in {"script", "img", "iframe", "object", "embed", "form", "base"}
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "xlink:href", "srcset", "action", "style"):
            assert attributes.get(name, "#").startswith(("#", "data:")), (tag, attributes)
    assert "url(" not in STYLE
    assert "@import" not in STYLE


def test_it_can_be_read_by_a_screen_reader():
    found = page(*promoted())
    assert next(a["lang"] for tag, a in found.tags if tag == "html") == "en"
    charts = [attributes for tag, attributes in found.tags if tag == "svg"]
    assert len(charts) >= 8
    for chart in charts:
        assert chart["role"] == "img"
        assert set(chart["aria-labelledby"].split()) <= set(found.ids)
    tags = [tag for tag, _ in found.tags]
    assert tags.count("table") == tags.count("caption") == tags.count("thead")
    assert all(a["scope"] in ("row", "col") for tag, a in found.tags if tag == "th")
    levels = [int(tag[1]) for tag in tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(deeper <= level + 1 for level, deeper in pairwise(levels))
    assert all(a["href"][1:] in found.ids for tag, a in found.tags if tag == "a" and "download" not in a)


def luminance(colour):
    full = colour if len(colour) == 7 else "#" + "".join(sign * 2 for sign in colour[1:])
    parts = [int(full[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("theme", [0, 1, 2], ids=["light", "dark", "print"])
def test_text_has_contrast_on_its_ground_in_every_theme(theme):
    colours = {}
    for block in (
        re.findall(r":root\{(.*?)\}", STYLE, re.S)[: theme + 1]
        if theme < 2
        else re.findall(r":root\{(.*?)\}", STYLE, re.S)[0::2]
    ):
        colours |= dict(re.findall(r"--([\w-]+):(#[0-9a-f]{3,6})", block))
    pairs = [(ink, ground) for ink in ("ink", "soft", "new", "old", "bad") for ground in ("card", "page")]
    pairs += [(kind, f"{kind}-bg") for kind in ("good", "bad", "warn")] + [("ink", "plain-bg"), ("ink", "code")]
    for ink, ground in pairs:
        bright, dark = sorted((luminance(colours[ink]), luminance(colours[ground])), reverse=True)
        assert (bright + 0.05) / (dark + 0.05) >= 4.5, (ink, ground)
    for mark in ("new-fill", "old-fill", "s1", "s2", "s3"):
        bright, dark = sorted((luminance(colours[mark]), luminance(colours["card"])), reverse=True)
        assert (bright + 0.05) / (dark + 0.05) >= 2.4, mark


HOSTILE = "</script><img src=x onerror=alert(1)>\"'&<b>\x1b[2J\u202e\ud800]]>{{x}}"


def test_hostile_text_stays_text():
    held, trials = promoted()
    knob = Candidate(values={HOSTILE.replace("\ud800", ""): HOSTILE.replace("\ud800", "")})
    evil = HOSTILE.replace("\ud800", "")
    bad = failed_trial(12, knob, cause=evil)
    odd = trial(13, knob, reason=evil, surprises=(evil,))
    said = Decision(action="reject", at=T0, by=evil, reason=evil, candidate=evil)
    held = held.model_copy(
        update={
            "sentence": evil,
            "winner": knob,
            "history": (held.history[0].model_copy(update={"sentence": evil}),),
            "profile": profile().model_copy(update={"via": evil, "notes": (evil,)}),
            "promotion": promotion().model_copy(update={"back_reason": evil}),
        }
    )
    found = page(held, [*trials, bad, odd], decisions=[said], how_to_apply=evil)
    assert not {"img", "b", "script"} & {tag for tag, _ in found.tags}
    assert found.text.count("onerror=alert(1)") >= 8
    assert "\x1b" not in found.text
    assert "\u202e" not in found.text


def test_credentials_reach_neither_the_page_nor_its_data():
    spec = tuning(
        target={
            "command": ["vllm", "serve", "m", "--port", "{port}", "--api-key", "S3CRET-a"],
            "environment": {"HF_TOKEN": "S3CRET-b", "OTHER": "S3CRET-c"},
        },
        spare={"environment": {"X": "S3CRET-d"}},
        metrics={"prometheus": "http://user:S3CRET-e@prometheus:9090"},
    )
    bad = failed_trial(
        0, BASELINE, cause="args: api_key='S3CRET-f', Authorization: Bearer S3CRET-g --hf-token S3CRET-h"
    )
    seen = profile().model_copy(update={"via": "Prometheus at http://user:S3CRET-i@host:9090"})
    held = record(tuning=spec, baseline=BASELINE, profile=seen)
    text = render_report(held, [bad])
    assert "S3CRET" not in text
    data = json.dumps(Page(text).data())
    assert "S3CRET" not in data
    assert data.count("(hidden)") >= 9
    assert "HF_TOKEN" in data


def test_the_result_of_the_quality_gate_is_told_without_the_answers():
    held, done = promoted()
    said = Answer(prompt="p", text="an answer", tokens=("an", "answer"))
    answered = [t.model_copy(update={"answers": (said,)}) for t in done]
    text = Page(render_report(held, answered)).text
    assert "Quality gate passed: 100.0% of answer tokens agree with the baseline's" in text
    assert "an answer" not in render_report(held, answered)
    assert "Quality gate" not in Page(render_report(held, done)).text


def test_the_gate_s_answers_are_not_in_the_report():
    held, _ = promoted()
    assert "an answer" not in json.dumps(
        report_data(held, [trial(0, BASELINE, answers=(Answer(prompt="p", text="an answer"),))])
    )


def test_what_an_approver_should_know_stands_with_the_answer():
    held, trials = promoted()
    assert "What else to know" not in page(held, trials).text
    held = held.model_copy(update={"notes": ("helm owns the arguments", "HorizontalPodAutoscaler hpa scales it")})
    text = page(held, trials).text
    at = text.index("What else to know of production helm owns the arguments HorizontalPodAutoscaler hpa scales it")
    assert at < text.rindex("What each change is worth")


def test_an_unconfirmed_gain_is_called_so():
    text = page(record(Phase.SEARCHING, baseline=BASELINE), search_trials()).text
    assert "in one run and not confirmed" in text
    assert "gain was not confirmed in turns with the baseline" in text


def test_an_approval_names_what_it_stands_for():
    held, trials = promoted()
    waiting = held.model_copy(update={"phase": Phase.AWAITING_APPROVAL})
    text = page(waiting, trials).text
    assert "tunewright approve chat" in text
    assert f"candidate {WINNER.hash}" in text
    assert BASELINE.hash in text


@pytest.mark.parametrize(
    ("phase", "named"),
    [
        (Phase.AWAITING_APPROVAL, False),
        (Phase.CANARY, True),
        (Phase.ROLLING, True),
        (Phase.WATCHING, True),
        (Phase.PROMOTED, True),
        (Phase.ROLLED_BACK, False),
    ],
)
def test_the_command_that_goes_back_is_named_where_it_has_something_to_do(phase: Phase, named: bool):
    held, trials = promoted()
    text = page(held.model_copy(update={"phase": phase}), trials).text
    assert ("Go back with tunewright rollback chat" in text) is named


def test_a_latency_objective_is_shown_positive_with_smaller_better():
    spec = tuning(objective={"minimize": "ttftP95"})
    slow = trial(0, BASELINE, purpose="baseline", objective=-0.4)
    quick = trial(1, WINNER, objective=-0.2)
    text = page(record(Phase.SEARCHING, tuning=spec, baseline=BASELINE), [slow, quick]).text
    assert "+50.0% with" in text
    assert "best 0.2 s, baseline 0.4 s" in text
    assert "400 ms" in text
    assert "-0.2" not in text


def test_every_phase_makes_a_page_with_nothing_yet_and_with_everything():
    whole, trials = promoted()
    for phase in Phase:
        empty = page(record(phase), [])
        assert "No trial has been started yet." in empty.text
        page(whole.model_copy(update={"phase": phase}), trials)


@st.composite
def partial_tunings(draw):
    """A record of which any part may be missing, with any of the trials, in any phase."""

    def maybe(value):
        return value if draw(st.booleans()) else None

    seen = maybe(profile())
    if seen is not None and draw(st.booleans()):
        empty = Histogram(edges=(), counts=())
        seen = seen.model_copy(
            update={"prompt_tokens": empty, "output_tokens": empty, "prefix_reuse": None, "acceptance": (0.7, 0.4)}
        )
    figures = st.floats(-1e12, 1e12) | st.just(0.0)
    trials = draw(st.lists(st.sampled_from([*search_trials(), *confirm_trials()]), unique_by=lambda t: t.id))
    odd = [
        trial(
            100 + n,
            Candidate(values={"max_num_seqs": n}),
            phase=draw(st.sampled_from(TrialPhase)),
            objective=maybe(draw(figures)),
            measurement=maybe(measurement(abs(draw(figures)), draw(st.floats(0, 1e6)))),
            outcome=maybe("complete"),
            slo_margin=maybe(draw(figures)),
            ready_at=maybe(T0),
            created_at=draw(st.sampled_from([0.0, T0, T0 + 1e6])),
            finished_at=maybe(T0 + 500),
        )
        for n in range(draw(st.integers(0, 3)))
    ]
    wild = Gain(
        estimate=Estimate(value=draw(figures), low=draw(figures), high=draw(figures)),
        rounds=draw(st.integers(0, 9)),
        status=draw(st.sampled_from(ConfirmStatus)),
        reason="r",
    )
    finalists = [Finalist(candidate=WINNER, gain=draw(st.sampled_from([None, gain(), wild])))]
    moved = promotion().model_copy(update={"canary_since": maybe(T0), "verdict": maybe(promotion().verdict)})
    held = record(
        draw(st.sampled_from(Phase)),
        tuning=draw(st.sampled_from([tuning(), tuning(objective={"minimize": "e2eP99"}, slo={})])),
        suspended_since=maybe(T0),
        sentence=draw(st.sampled_from(["", "It goes on."])),
        profile=seen,
        baseline=maybe(BASELINE),
        baseline_noise=maybe(0.01),
        finalists=tuple(draw(st.sampled_from([[], finalists]))),
        winner=maybe(draw(st.sampled_from([WINNER, BASELINE, Candidate()]))),
        promotion=maybe(moved),
        history=history(*draw(st.lists(st.sampled_from(Phase), max_size=3))),
    )
    return held, [*trials, *odd]


@settings(steady, max_examples=40)
@given(partial_tunings())
def test_any_partial_tuning_makes_a_whole_page(partial):
    found = page(*partial)
    assert "nan" not in re.findall(r"[a-z]+", found.text.lower())
    for _, attributes in found.tags:
        for name in ("x", "y", "cx", "cy", "x1", "x2", "y1", "y2", "width", "height", "d"):
            assert not re.search(r"nan|inf|e[+-]\d", attributes.get(name, "")), attributes
    assert found.data()["summary"]["tuning"] == "chat"


@settings(steady, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 50), st.none() | st.floats(-1e15, 1e15), st.booleans()), max_size=8),
       st.none() | st.floats(-1e15, 1e15))  # fmt: skip
def test_a_chart_holds_any_values_inside_its_frame(points, baseline):
    points = [Point(n, value, good, f"trial {n}") for n, value, good in points]
    chart = progress_chart(points, baseline, "s", larger_is_better=True)
    for name, value in re.findall(r' (cx|cy|x1|x2|y1|y2)="([^"]*)"', chart):
        assert -1 <= float(value) <= (521 if "x" in name else 297), chart


def test_charts_of_nothing_are_empty():
    assert progress_chart([], None, "s", True) == ""
    assert histogram_chart("a", "b", Histogram(edges=(1, 2), counts=(0, 0))) == ""
    assert "NaN" not in interval_chart(Estimate(value=0, low=0, high=0), 0.0)
    assert 'width="0"' in time_chart(SpareTime(starting=1.0))


def test_a_winner_by_the_slo_alone_is_not_called_settled_by_its_interval():
    done, trials = promoted()
    wide = Gain(
        estimate=Estimate(value=1.97, low=-0.8, high=47.0), rounds=2, status=ConfirmStatus.BETTER,
        reason="meets the SLO, which the baseline missed in all of 2 rounds",
    )  # fmt: skip
    held = done.model_copy(update={"finalists": (Finalist(candidate=WINNER, gain=wide),)})
    text = page(held, trials).text
    assert "settled by the SLO" in text
    assert "Better, though the size of the gain is not settled: it meets the SLO, which the baseline missed" in text
    assert "settled by the SLO" not in page(done, trials).text


def test_where_there_are_several_spares_each_round_says_who_ran_where():
    done, _ = promoted()
    rounds = [each.model_copy(update={"slot": number % 2}) for number, each in enumerate(confirm_trials())]
    alone = Page(render_report(done, rounds)).text
    assert "(spare" not in alone
    several = done.model_copy(update={"tuning": tuning(spare={"parallelism": 2})})
    text = Page(render_report(several, rounds)).text
    assert text.count("(spare 0)") == text.count("(spare 1)") == 3


def test_charts_are_readable_on_a_phone():
    """They are drawn 520 wide and shown some 300 wide: letters of the size for wide screens would be 7 pixels high."""
    phone = STYLE[STYLE.index("@media (max-width:30rem)") :]
    sizes = [float(size) for size in re.findall(r"svg [.\w]+\{font-size:([\d.]+)px\}", phone)]
    assert len(sizes) == 2
    assert min(sizes) * 297 / 520 > 8
    assert STYLE.index("@media (max-width:30rem)") > STYLE.index("svg text{font-size:13px")  # the later rule counts


def test_a_step_of_many_changes_stays_inside_the_chart_and_whole_in_its_text_alternative():
    label = ", ".join(f"some_knob_{number} 1 → 2" for number in range(9))
    found = ladder_chart([Step(label, 0.2, 0.1, 0.3, 0.1, 0.3)], None)
    texts = re.findall(r"<text [^>]*>([^<]*)</text>", str(found))
    (line,) = [text for text in texts if text.startswith("some_knob")]
    assert len(line) == LETTERS
    assert line.endswith("…: +20.0%, together +30.0%")
    assert f"{label}: from +10.0% to +30.0%" in str(found)


def test_what_was_read_of_a_config_map_is_told_also_before_it_is_copied():
    spec = {"target": {"deployment": "chat"}, "load": {"promptsConfigMap": "monday"}}
    kept = LoadFile(
        config_map="monday", key="prompts.jsonl", digest="a" * 64, path="/there", told="2 prompts, sha256 aa"
    )
    copied = record(Phase.SEARCHING, tuning=tuning(**spec), profile=profile(), load_file=kept)
    text = render_report(copied, [])
    assert "The load tests read a copy of 2 prompts, sha256 aa." in text
    assert "the texts of /there" in text
    edited = record(Phase.SEARCHING, tuning=tuning(**spec), profile=profile())
    assert "the texts of ConfigMap monday" in render_report(edited, [])
