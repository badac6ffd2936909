"""What tuning decides by, and its log: ``tune.json`` in the bundle, a hidden file beside the bundle until then.

==========  ==========================================================================================
key         value
==========  ==========================================================================================
format      1
base        sha256 of the model that tuning began with
result      sha256 of the model that it ended with, or null
start       settings by name that tuning began with
setting     what figures depend on: lengths, batch sizes, mode, cores, limits, CPU, onnxruntime
tried       [{stage, candidate, against, verdict, reason, ratio, low, high, turns, candidate_ms, against_ms,
            min_cosine, max_abs, seconds}]: candidate and against are settings by name; ``ratio`` is the candidate's
            time by the other's, the median over turns with its 95 % interval
winner      settings by name, or null while tuning is not at its end
finished    true when every stage was gone through, false when time ran out before
==========  ==========================================================================================
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError

__all__ = ["LOG_NAME", "Judgement", "TuneLog", "Verdict", "judge"]

LOG_NAME = "tune.json"

FORMAT = 1

MIN_GAIN = 0.01
"""A change that gains less is not worth that a bundle becomes another one."""

_CHANCE = 0.01
"""How often chance alone may look like a gain: small, for turns are added until a verdict is reached."""

_RESAMPLES = 2000


class Verdict:
    """What came of a candidate."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "no difference"
    REFUSED = "refused"
    PARITY = "outside of the limit"

    ALL = (FASTER, SLOWER, SAME, REFUSED, PARITY)


@dataclasses.dataclass(frozen=True)
class Judgement:
    """What turns say so far.

    Attributes:
        verdict: ``faster``, ``slower``, ``no difference``, or ``None`` while turns do not tell.
        ratio: The candidate's time by the incumbent's, median over turns.
        low: Lower end of its 95 % interval.
        high: Upper end.
    """

    verdict: str | None
    ratio: float
    low: float
    high: float


def judge(ratios: Sequence[float], *, last: bool = False) -> Judgement:
    """Tells from the ratios of turns whether a candidate is faster beyond noise.

    It is where the bootstrap interval of the median lies beyond the least gain, and a sign test agrees that so many
    turns on one side are no chance. The interval alone is too narrow with few turns, the sign test alone knows no
    size.

    Args:
        ratios: The candidate's time by the incumbent's, turn by turn.
        last: There will be no more turns: undecided is no difference.
    """
    values = np.asarray(ratios, float)
    drawn = np.random.default_rng(0).choice(values, (_RESAMPLES, len(values)))
    low, high = (float(each) for each in np.percentile(np.median(drawn, axis=1), (2.5, 97.5)))
    ratio = statistics.median(values.tolist())
    verdict = None
    if high < 1 - MIN_GAIN and _sign_test(int((values < 1).sum()), len(values)) <= _CHANCE:
        verdict = Verdict.FASTER
    elif low > 1 and _sign_test(int((values > 1).sum()), len(values)) <= _CHANCE:
        verdict = Verdict.SLOWER
    elif last or (low > 1 - MIN_GAIN and high < 1 + MIN_GAIN):
        verdict = Verdict.SAME
    return Judgement(verdict, ratio, low, high)


def _sign_test(wins: int, count: int) -> float:
    """How likely at least so many wins are where both sides are alike."""
    return sum(math.comb(count, i) for i in range(wins, count + 1)) / 2**count


class TuneLog:
    """The log on disk: written after every candidate, read back when tuning goes on.

    Args:
        folder: The bundle's folder.
        base: sha256 of the bundle's model.
        setting: What figures depend on; a log of another setting is begun anew.
        start: The settings that the bundle has.
        fresh: Begin anew in any case.

    Attributes:
        resumed: How many candidates were found in the log.
        start: The settings that the log's first candidates were tried against.
        winner: What the log of a tuning that ended with this model had chosen, to go on from; ``None`` without one.

    Raises:
        InputError: The folder beside the bundle cannot be written to.
    """

    def __init__(
        self,
        folder: Path,
        base: str,
        setting: Mapping[str, Any],
        start: Mapping[str, Any],
        *,
        fresh: bool = False,
    ) -> None:
        self._path = folder.parent / f".{folder.name}.{LOG_NAME}"
        self._content: dict[str, Any] = {
            "format": FORMAT, "base": base, "result": None, "start": dict(start), "setting": dict(setting), "tried": [],
            "winner": None, "finished": False,
        }  # fmt: skip
        self.winner: dict[str, Any] | None = None
        # The one beside the bundle was cut short; the one inside ended, maybe for want of time.
        for found in () if fresh else (_read(self._path), _read(folder / LOG_NAME)):
            if found is not None and self._fits(found):
                self._content |= {key: _finite(found[key]) for key in ("base", "start", "tried")}
                self.winner = found.get("winner") if found.get("result") == base else None
                self._content["result"] = base if self.winner is not None else None
                self._content["winner"] = self.winner
                break
        self.start: dict[str, Any] = self._content["start"]
        self.resumed = len(self._content["tried"])
        self._write()

    def _fits(self, found: Mapping[str, Any]) -> bool:
        same = all(found.get(key) == self._content[key] for key in ("format", "setting"))
        return same and self._content["base"] in (found.get("base"), found.get("result"))

    def of(self, stage: str) -> list[dict[str, Any]]:
        """The entries of a stage, in the order they were tried."""
        return [entry for entry in self._content["tried"] if entry.get("stage") == stage]

    @property
    def best(self) -> dict[str, Any]:
        """The settings that the entries lead to: from the last winner, else from the start, along what was faster."""
        best = self.start if self.winner is None else self.winner
        for entry in self._content["tried"]:
            if entry["against"] == best and entry["verdict"] == Verdict.FASTER:
                best = entry["candidate"]
        return best

    def add(self, entry: Mapping[str, Any]) -> None:
        """Keeps what was found out, at once: a kill loses no more than the candidate at hand.

        Numbers that are not finite, such as the cosine of a model that gives NaN, are kept as null.
        """
        self._content["tried"].append(_finite(dict(entry)))
        self._write()

    @property
    def tried(self) -> list[dict[str, Any]]:
        """All entries."""
        return list(self._content["tried"])

    def text(self, winner: Mapping[str, Any], result: str, *, finished: bool) -> str:
        """What ``tune.json`` holds."""
        self._content |= {"winner": dict(winner), "result": result, "finished": finished}
        return json.dumps(self._content, indent=1, allow_nan=False) + "\n"

    def remove(self) -> None:
        """Removes the hidden file, once the log is in the bundle."""
        self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        text = json.dumps(self._content, indent=1, allow_nan=False) + "\n"
        whole = self._path.with_suffix(".tmp")
        try:
            whole.write_text(text, encoding="utf-8")
            whole.replace(self._path)
        except OSError as error:
            raise InputError(f"{self._path}: cannot be written: {error.strerror}") from error


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null in their place."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read(path: Path) -> dict[str, Any] | None:
    """A log that can be gone on with; ``None`` for none, and for one that something has damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    entries = content.get("tried") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        return None
    sound = all(
        isinstance(each, dict) and each.get("verdict") in Verdict.ALL and {"candidate", "against"} <= set(each)
        for each in entries
    )
    return content if sound and isinstance(content.get("start"), dict) else None
