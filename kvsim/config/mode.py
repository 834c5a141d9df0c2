"""How a workload is offered to the fleet: the keys that every kind of `[workload]` takes beside its own.

A session is what its `session` column groups; a request of a trace without sessions is one by itself. Two questions are
answered, each by one key: when a session's first request starts (`starts`), and what its later ones follow (`pacing`).
The others bound how many sessions are open at once, how long answers are, and when the run ends. docs/WORKLOADS.md has
each mode with an example; `kvsim.workload.offered` and `kvsim.arrivals` carry them out.
"""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, PlainValidator, model_validator

from kvsim.toml import PositiveCount, Table

Positive: TypeAlias = Annotated[float, Field(gt=0)]
Lens: TypeAlias = Annotated[PositiveCount, Field(lt=2**32)]

NEEDS: dict[str, tuple[str, ...]] = {
    "recorded": (),
    "all_at_once": (),
    "poisson": ("rate_per_s",),
    "ramp": ("rate_per_s", "end_rate_per_s", "ramp_s"),
    "diurnal": ("rate_per_s",),
}
"""Keys that come with each `starts`."""
MAY_HAVE: dict[str, tuple[str, ...]] = {"diurnal": ("period_s", "peak_ratio", "profile")}
DAY_S = 86_400.0
MAX_SPAN_S = 9_000_000
"""Longest time that a trace spans."""


def _profile(value: object) -> tuple[float, ...]:
    """Rates as TOML writes them, of which only the ratios count."""
    if isinstance(value, list | tuple) and value and all(type(rate) in (int, float) for rate in value):
        rates = tuple(float(rate) for rate in value)
        if min(rates) >= 0 and 0 < sum(rates) < float("inf"):
            return rates
    raise ValueError("a list of rates of equal parts of the period, none below 0 and one above, as in [1, 4, 2]")


class Mode(Table):
    """When sessions start and what follows what; what is not set leaves the workload as it is recorded."""

    starts: Literal["recorded", "all_at_once", "poisson", "ramp", "diurnal"] = "recorded"
    """Of sessions. The last three draw a Poisson process, of a rate that is constant, grows or falls, or has a daily
    course; sessions take its points in the order in which they are recorded to start."""
    rate_per_s: Annotated[float, Field(ge=0)] | None = None
    """Sessions a second: of a Poisson process, at the beginning of a ramp, the mean of a day."""
    end_rate_per_s: Positive | None = None
    """Sessions a second at the end of a ramp, and from there on."""
    ramp_s: Positive | None = None
    period_s: Positive | None = None
    """Of the daily course; a day unless told otherwise."""
    peak_ratio: Annotated[float, Field(ge=1, le=10)] | None = None
    """Highest rate over the mean, of a course whose logarithm is a sine and which starts at its lowest."""
    profile: Annotated[tuple[float, ...], PlainValidator(_profile)] | None = None
    """Instead of it: rates of equal parts of the period, of which only the ratios count."""
    time_scale: Positive = 1.0
    """Recorded times (starts and pauses) are this many times as long: 0.5 replays twice as fast."""
    pacing: Literal["recorded", "open", "after_answer", "start_to_start"] = "recorded"
    """What a session's later requests follow. "open": nothing, each starts when it was recorded to, counted from its
    session's start. "after_answer": the answer before, by the recorded pause. "start_to_start": the start before, by
    the recorded distance, or its answer when that comes later."""
    turn_delay_s: Annotated[float, Field(ge=0, le=MAX_SPAN_S)] | None = None
    """That pause or distance, instead of the recorded ones."""
    max_sessions: PositiveCount | None = None
    """Sessions open at once; the next one waits for one to end."""
    forced_output_len: Lens | None = None
    """Every answer has this length."""
    min_output_len: Lens | None = None
    max_output_len: Lens | None = None
    stop_after_s: Annotated[float, Field(gt=0, le=MAX_SPAN_S)] | None = None
    """The run ends at this time, with what is unfinished."""
    stop_after_requests: PositiveCount | None = None
    """The run ends when so many requests have: completed, or rejected."""
    stop_after_sessions: PositiveCount | None = None
    """The run ends when so many sessions have: 1 as a client does that stops with its first conversation."""

    @model_validator(mode="after")
    def _makes_sense(self) -> "Mode":
        for complaint in (self._wrong_rates(), self._wrong_pacing(), self._wrong_lens()):
            if complaint is not None:
                raise ValueError(complaint)
        return self

    def chosen(self) -> dict[str, Any]:
        """The keys of a mode that are set, and those that always are."""
        return self.model_dump(include=set(Mode.model_fields), exclude_none=True)

    def _wrong_rates(self) -> str | None:
        for key in ("rate_per_s", "end_rate_per_s", "ramp_s", *MAY_HAVE["diurnal"]):
            users = [starts for starts in NEEDS if key in NEEDS[starts] + MAY_HAVE.get(starts, ())]
            if getattr(self, key) is not None and self.starts not in users:
                return f"{key} with starts = {' or '.join(users)}, not {self.starts}: set that or leave {key} out"
            if getattr(self, key) is None and key in NEEDS[self.starts]:
                return f"{key} as well, which starts = {self.starts} needs"
        if self.starts != "ramp" and self.rate_per_s == 0:
            return f"rate_per_s above 0: at 0 no session starts with starts = {self.starts}"
        if self.starts == "diurnal" and (self.peak_ratio is None) == (self.profile is None):
            return "peak_ratio or profile with starts = diurnal, one of them"
        spread_s = getattr(self, "start_spread_s", 0)
        if self.starts != "recorded" and spread_s:
            return f"start_spread_s only with starts = recorded: starts = {self.starts} says when sessions start"
        return None

    def _wrong_pacing(self) -> str | None:
        if self.turn_delay_s is not None and self.pacing == "recorded":
            return "pacing = after_answer, start_to_start or open with turn_delay_s, or no turn_delay_s"
        if self.time_scale != 1 and self.starts != "recorded" and self.turn_delay_s is not None:
            return f"no time_scale: with starts = {self.starts} and turn_delay_s no recorded time is used"
        return None

    def _wrong_lens(self) -> str | None:
        shortest, longest = self.min_output_len, self.max_output_len
        if self.forced_output_len is not None and (shortest, longest) != (None, None):
            return "forced_output_len or a bound (min_output_len, max_output_len), not both"
        if shortest is not None and longest is not None and shortest > longest:
            return f"min_output_len = {shortest} up to max_output_len = {longest}"
        return None
