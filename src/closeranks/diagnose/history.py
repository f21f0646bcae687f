"""A rank held against its own past: what it should have issued next, and what it did instead.

With two ranks there is no majority, but training repeats itself. The collectives of one rank are read as a
string of tokens (group, call site, op, steps since the one before); the next token is predicted by the
place in the past whose preceding tokens match best, which follows periods of any length (a barrier every
ten steps) without being told of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from closeranks.progress import Collective, Page

__all__ = ["Conduct", "History", "Judgement"]

_FIRM_CONTEXT = 4  # tokens in a row that were the same before: then what followed them is a pattern

_Token = tuple[int, str, int, str, int]


class Conduct(StrEnum):
    """How a rank behaved at one sequence number, measured by its own past."""

    AS_BEFORE = "as before"
    SKIPPED = "skip_collective"
    EXTRA = "extra_collective"
    OTHER_TYPE = "type_mismatch"
    OTHER_SIZE = "size_mismatch"
    OTHER_DTYPE = "dtype_mismatch"
    OTHER_ORDER = "wrong_order"
    NO_HISTORY = "no history"

    @property
    def deviates(self) -> bool:
        return self not in (Conduct.AS_BEFORE, Conduct.NO_HISTORY)


@dataclass(frozen=True, slots=True)
class Judgement:
    """``expected``: an earlier record of the kind that was due; ``agreeing``: how often it came before."""

    conduct: Conduct
    expected: Collective | None = None
    actual: Collective | None = None
    agreeing: int = 0
    firm: bool = False  # the past was long enough to have a pattern


class History:
    """The collectives of one rank in program order, all groups together."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self.records = page.collectives
        self._at = {(r.group, r.seq): i for i, r in reversed(tuple(enumerate(self.records)))}
        self._tokens: list[_Token | None] = [None] * min(1, len(self.records))
        for before, record in pairwise(self.records):
            self._tokens.append(self._token(record, record.step - before.step))
        # The same as a string, one character a token, so that the search for the past is str.find's.
        letters: dict[_Token | None, str] = {}
        self._text = "".join(letters.setdefault(token, chr(1 + len(letters))) for token in self._tokens)

    @staticmethod
    def _token(record: Collective, steps: int) -> _Token:
        return (record.group, record.file, record.line, record.op, steps)

    def index_of(self, group: int, seq: int) -> int | None:
        return self._at.get((group, seq))

    def _predict(self, index: int) -> tuple[int | None, int, bool]:
        """The past position most like ``index`` (its token is the prediction), how often that token came
        before, and whether its context did.

        Of all places whose preceding tokens agree with ours over the longest stretch, what most often
        followed; the newest in a tie. The first token of the ring takes no part: its distance is unknown.
        """
        text = self._text
        length, above = 0, index - 1
        while length < above:  # a suffix that occurs earlier has only suffixes that do
            middle = (length + above + 1) // 2
            if text.rfind(text[index - middle : index], 1, index - 1) >= 0:
                length = middle
            else:
                above = middle - 1
        if length:
            suffix = text[index - length : index]
            found: list[int] = []
            at = text.find(suffix, 1, index - 1)
            while at >= 0:
                found.append(at + length)
                at = text.find(suffix, at + 1, index - 1)
            votes = Counter(text[i] for i in found)
            best = max(reversed(found), key=lambda i: votes[text[i]])
            times = text.count(text[best], 1, index)
            return best, times, times >= 2 and length >= _FIRM_CONTEXT
        # Too short a past for context: take what is usual, if anything is.
        usual = Counter(text[1:index]).most_common(1)
        if usual and usual[0][1] * 3 >= (index - 1) * 2:
            return text.rfind(usual[0][0], 1, index), usual[0][1], False
        return None, 0, False

    def judge(self, index: int) -> Judgement:
        """How the record at ``index`` fits what came before it."""
        actual = self.records[index]
        predicted, agreeing, firm = self._predict(index)
        if predicted is None:
            return Judgement(Conduct.NO_HISTORY, None, actual)
        expected = self.records[predicted]
        want, have = self._tokens[predicted], self._tokens[index]
        if want is None or have is None:
            return Judgement(Conduct.NO_HISTORY, None, actual)
        if want == have:
            conduct = self._judge_shape(index)
        elif want[:3] == have[:3] and want[4] == have[4]:
            conduct = Conduct.OTHER_TYPE
        else:
            conduct = self._judge_order(index, predicted)
        return Judgement(conduct, expected, actual, agreeing, firm)

    def _judge_order(self, index: int, predicted: int) -> Conduct:
        """Another token than the predicted one: was one left out, or one put in?"""
        want, have = self._tokens[predicted], self._tokens[index]
        assert want is not None and have is not None
        if want[:4] == have[:4]:  # the same collective, after fewer or more steps than usual
            return Conduct.SKIPPED if have[4] > want[4] else Conduct.EXTRA
        steps = want[4]
        for later in range(predicted + 1, min(index, predicted + 16)):
            token = self._tokens[later]
            assert token is not None
            steps += token[4]
            if token[:4] == have[:4] and steps == have[4]:
                return Conduct.SKIPPED
        known = any(token is not None and token[:3] == have[:3] for token in self._tokens[1:index])
        if not known and want[0] != have[0] and self._is_due_later(predicted, index, have):
            return Conduct.OTHER_ORDER
        expected, actual = self.records[predicted], self.records[index]
        if known and have[4] > want[4]:
            return Conduct.SKIPPED
        replaced = have[3] != want[3] and have[4] == want[4] and have[0] == want[0]
        if not known and replaced and actual.numel == expected.numel:
            return Conduct.OTHER_TYPE
        return Conduct.EXTRA

    def _is_due_later(self, predicted: int, index: int, have: _Token) -> bool:
        """Whether this group's op, called from another line, would have come soon after what was due."""
        soon = self._tokens[predicted + 1 : min(index, predicted + 8)]
        return any(token is not None and (token[0], token[3]) == (have[0], have[3]) for token in soon)

    def _judge_shape(self, index: int) -> Conduct:
        """The predicted collective, but of another size, type or distance than this call ever had?"""
        actual = self.records[index]
        earlier = [
            i for i in range(1, index)
            if self._tokens[i] is not None and self._tokens[i] == self._tokens[index]
        ]  # fmt: skip
        dtypes = {self.records[i].dtype for i in earlier}
        if len(dtypes) == 1 and actual.dtype not in dtypes:
            return Conduct.OTHER_DTYPE
        sizes = {self.records[i].numel for i in earlier}
        if len(sizes) == 1 and actual.numel not in sizes:
            return Conduct.OTHER_SIZE
        # Collectives issued from C++ leave no record, but they count: their number shows in the distance.
        distances = {d for i in earlier if (d := self._distance(i)) is not None}
        distance = self._distance(index)
        if distance is not None and len(distances) == 1 and distance not in distances:
            return Conduct.EXTRA if distance > min(distances) else Conduct.SKIPPED
        return Conduct.AS_BEFORE

    def _distance(self, index: int) -> int | None:
        """Sequence numbers between this record and the one before it, where both are of one group."""
        record, before = self.records[index], self.records[index - 1]
        return record.seq - before.seq if record.group == before.group else None

    def judge_silence(self, group: int, seq: int) -> Judgement:
        """How fitting it is that the rank passed ``seq`` without a record: did C++ issue it as always, or
        was a visible collective due there?"""
        following = min((r.seq for r in self.records if r.group == group and r.seq > seq), default=None)
        if following is not None:
            return self.judge(self._at[group, following])
        mine = [i for i, r in enumerate(self.records) if r.group == group]
        if not mine:
            steps = [s for s in self._page.steps if s.world_seq]
            grew = len(steps) >= 2 and steps[-1].world_seq > steps[0].world_seq
            return Judgement(Conduct.AS_BEFORE if grew else Conduct.NO_HISTORY)
        last = mine[-1]
        if last != len(self.records) - 1 or last < 1:
            return Judgement(Conduct.NO_HISTORY)
        predicted, agreeing, firm = self._predict(last + 1)
        if predicted is None and len({(r.file, r.line) for r in self.records}) == 1:
            predicted, agreeing = last, 1  # twice the same line and nothing else: that far apart
        if predicted is None or (gap := self._distance(predicted)) is None:
            return Judgement(Conduct.NO_HISTORY)
        late = seq >= self.records[last].seq + gap
        conduct = Conduct.SKIPPED if late else Conduct.AS_BEFORE
        return Judgement(conduct, self.records[predicted], None, agreeing, firm)
