"""Random schedules: requests of every kind, and whatever may come between their steps."""

import random
import sys
from collections import Counter
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.engine.machine import catalogue
from tests.engine.machine.driver import Driver
from tests.engine.machine.setting import MAX_MODEL_LEN, Setting
from tests.engine.machine.worker import NUM_TOKEN_IDS

SALTS = st.sampled_from([None, None, None, "other"])
SHARES = st.sampled_from([None, None, None, 0.3, 0.6, 0.9, 1.0])
PACES = st.sampled_from([None, None, 3e-2, 1e-2, 1e-3, 1e-6])
"""Seconds that a worker's compressions take for an entry, or that its next ones fail."""

STEPS = st.sampled_from([0, 1, 3, 8, 20])
"""That follow at once."""

FAMILIES = 3
"""Texts that prompts begin with."""

_RNG = random.Random(7)
TEXTS = [[_RNG.randint(1, NUM_TOKEN_IDS) for _ in range(MAX_MODEL_LEN)] for _ in range(FAMILIES)]

SETTINGS = st.builds(
    Setting,
    num_blocks=st.sampled_from([64, 40, 24, 16]),
    is_async=st.booleans(),
    has_windows=st.sampled_from([False, False, True]),
    has_prefix_cache=st.sampled_from([True, True, True, True, True, False]),
    head_pages=st.sampled_from([True, True, True, False]),
    by_priority=st.booleans(),
    step_tokens=st.sampled_from([2, 7, 16, 32, 64]),
    chunk=st.sampled_from([0, 0, 1, 5]),
    max_seqs=st.sampled_from([1, 2, 4, 8]),
    external_tokens=st.sampled_from([None, 100]),
)


class Machine(RuleBasedStateMachine):
    """Each rule is an operation, or some: see ``Driver.operations``."""

    operations = 0
    """Of all machines of this process."""
    events: Counter[str] = Counter()

    driver: Driver

    @initialize(setting=SETTINGS)
    def start(self, setting: Setting) -> None:
        self.driver = Driver(setting)
        self.earlier: list[tuple[list[int], dict[str, Any], str | None]] = []
        """Prompts, what was asked for, and salts."""

    @rule(
        index=st.integers(0, 10_000),
        is_plain=st.sampled_from([True, False, False, False]),
        family=st.integers(0, FAMILIES - 1),
        common=st.integers(0, 60),
        length=st.integers(1, 70),
        max_tokens=st.integers(1, 40),
        share=SHARES,
        salt=SALTS,
        number=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.integers(0, 2),
        keeps=st.sampled_from([False, False, False, False, True]),
        then=STEPS,
    )
    def add(
        self, index, is_plain, family, common, length, max_tokens, share, salt, number, priority, keeps, then
    ) -> None:
        """Requests with one prompt: ``n`` of them, as vLLM makes them of one."""
        own = [(7 * index + 3 * place * place) % NUM_TOKEN_IDS + 1 for place in range(length)]
        prompt = [*TEXTS[family][: min(common, length)], *own[min(common, length) :]]
        fields: dict[str, Any] | None = None
        if not is_plain:
            known = catalogue.REPEATED if index % 5 == 1 else catalogue.fields()
            fields = known[index % len(known)]
            if share is not None and "trigger" not in fields:
                fields = fields | {"context_tokens": max(1, round(share * len(prompt)))}
            self.earlier = [*self.earlier[-5:], (prompt, fields, salt)]
        for child in range(number):
            stops = (index + child) % 4 == 0
            self.driver.add(prompt, max_tokens, fields, salt, priority, keeps and not is_plain, stops)
        self._run(then)

    @precondition(lambda self: self.driver.texts)
    @rule(
        index=st.integers(0, 10_000),
        text=st.integers(0, 5),
        question=st.integers(1, 8),
        max_tokens=st.integers(1, 30),
        then=STEPS,
    )
    def go_on(self, index: int, text: int, question: int, max_tokens: int, then: int) -> None:
        """The next turn of a request that has ended."""
        before, fields, salt = self.driver.texts[text % len(self.driver.texts)]
        prompt = [*before, *(one % NUM_TOKEN_IDS + 1 for one in range(index % 11, index % 11 + question))]
        if len(prompt) < MAX_MODEL_LEN:
            self.driver.add(prompt, max_tokens, None if index % 4 == 0 else fields, salt)
        self._run(then)

    @precondition(lambda self: self.earlier)
    @rule(
        index=st.integers(0, 10_000),
        which=st.integers(0, 5),
        question=st.integers(0, 6),
        max_tokens=st.integers(1, 30),
        number=st.sampled_from([1, 1, 2]),
        then=STEPS,
    )
    def ask_again(self, index: int, which: int, question: int, max_tokens: int, number: int, then: int) -> None:
        """Another question after a context that has been asked for before."""
        prompt, fields, salt = self.earlier[which % len(self.earlier)]
        context = fields.get("context_tokens", len(prompt))
        asked = [*prompt[:context], *(one % NUM_TOKEN_IDS + 1 for one in range(index % 7, index % 7 + question))]
        if "trigger" not in fields:
            fields = fields | {"context_tokens": context}
        for _ in range(number):
            self.driver.add(asked, max_tokens, fields, salt)
        self._run(then)

    @rule(number=st.integers(1, 30))
    def run(self, number: int) -> None:
        self._run(number)
        if self.driver.is_asleep:
            self.driver.wake()

    def _run(self, number: int) -> None:
        for _ in range(number):
            self.driver.step()

    @precondition(lambda self: self.driver.answers)
    @rule(which=st.integers(0, 5), then=STEPS)
    def verify(self, which: int, then: int) -> None:
        self.driver.verify(which)
        self._run(then)

    @precondition(lambda self: self.driver.names)
    @rule(which=st.integers(0, 7), meanwhile=st.booleans())
    def abort(self, which: int, meanwhile: bool) -> None:
        name = self.driver.names[which % len(self.driver.names)]
        if not (meanwhile and self.driver.step(aborted=name)):
            self.driver.abort([name])

    @precondition(lambda self: not self.driver.audit.taken)
    @rule(num_left=st.sampled_from([0, 1, 3, 6, 12, 24]), then=STEPS)
    def pin(self, num_left: int, then: int) -> None:
        self.driver.pin(num_left)
        self._run(then)

    @precondition(lambda self: self.driver.audit.taken)
    @rule()
    def unpin(self) -> None:
        self.driver.unpin()

    @precondition(lambda self: self.driver.names)
    @rule(number=st.integers(1, 2), pace=PACES)
    def trouble_worker(self, number: int, pace: float | None) -> None:
        """Compressions fail, or take longer or shorter than others have."""
        if pace is None:
            self.driver.worker.to_fail = number
        else:
            self.driver.worker.seconds_per_entry = pace

    @precondition(lambda self: self.driver.scheduler.running)
    @rule(which=st.integers(0, 7), number=st.integers(1, 3))
    def preempt(self, which: int, number: int) -> None:
        for _ in range(number):
            if running := self.driver.scheduler.running:
                self.driver.preempt(running[which % len(running)].request_id)

    @precondition(lambda self: self.driver.names)
    @rule(
        then=STEPS,
        what=st.sampled_from(["delete", "reset", "delete", "reset running", "delete", "sleep"]),
        mode=st.sampled_from(["abort", "keep", "wait"]),
        level=st.integers(0, 1),
        salt=SALTS,
    )
    def manage(self, what: str, mode: str, level: int, salt: str | None, then: int) -> None:
        """What whoever runs the server may ask for."""
        if what == "delete":
            self.driver.delete_context(salt)
        elif what != "sleep":
            self.driver.reset(what == "reset running")
        elif not self.driver.is_asleep:
            self.driver.sleep(mode, level)
        self._run(then)

    def teardown(self) -> None:
        if hasattr(self, "driver") and not isinstance(sys.exc_info()[1], Exception):  # of a rule that has failed
            Machine.operations += self.driver.operations
            before = self.driver.operations
            self.driver.finish()
            Machine.operations += self.driver.operations - before
            Machine.events.update(self.driver.events)
