"""Training loop of the package's models: schedule, checkpoints, export. Needs PyTorch and Transformers, and no vLLM.

Every few minutes the state goes to the folder ``stages`` of the output, so that an interrupted run goes on where it
stopped, to the same weights; each finished stage leaves in the output a model that Transformers and vLLM load.
"""

import argparse
import copy
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

WARMUP_STEPS = 40
WEIGHT_DECAY = 0.05
FINAL_LEARNING_RATE = 0.03
"""Share of the peak's."""
EARLIER = 0.25
"""Share of the batches that are an earlier stage's."""
SECONDS_PER_CHECKPOINT = 180
STEPS_PER_REPORT = 20


@dataclass(frozen=True)
class Stage:
    """repeats: documents are a passage that is repeated to the end, where the model's text has that."""

    length: int
    steps: int
    repeats: bool = False


@dataclass(frozen=True)
class Schedule:
    """tokens_per_step: of a batch, in whole documents but at least one. learning_rate: at its peak."""

    tokens_per_step: int
    learning_rate: float
    stages: tuple[Stage, ...]

    @property
    def num_steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def batch_size(self, length: int) -> int:
        """Documents of ``length`` tokens in a step."""
        return max(1, self.tokens_per_step // length)

    def draw_stage(self, rng: np.random.Generator, stage: int) -> Stage:
        """The stage whose documents a batch is of: this one, or an earlier one."""
        earlier = stage > 0 and rng.random() < EARLIER
        return self.stages[int(rng.integers(stage)) if earlier else stage]


def learning_rate(step: int, total: int) -> float:
    """As a share of the peak: warm-up, then a cosine."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / total))
    return min(1.0, (step + 1) / WARMUP_STEPS) * (FINAL_LEARNING_RATE + (1 - FINAL_LEARNING_RATE) * cosine)


class TrainingRun(ABC):
    """One run: the model, its optimizer and how far it has come.

    stop_after: leave a checkpoint and stop after this many steps in all, as an interruption would.
    """

    def __init__(self, schedule: Schedule, output: Path, seed: int, device: str, stop_after: int | None = None) -> None:
        self.schedule, self.output, self.seed, self.device, self.stop_after = schedule, output, seed, device, stop_after
        torch.manual_seed(seed)
        self.model = self.build_model().to(device)
        self.optimizers = self.build_optimizers()
        self.peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        self.step = 0
        self.checkpoint = output / "stages" / "latest.pt"
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        if self.checkpoint.exists():
            state = torch.load(self.checkpoint, map_location=device)
            self.model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.step = state["step"]

    @abstractmethod
    def build_model(self) -> LlamaForCausalLM:
        """The model before its training; draws from torch's default generator."""

    def build_optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizers of the model's parameters; a group's ``lr`` is its peak."""
        return [self.adamw(self.model.parameters())]

    def adamw(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        parameters = list(parameters)
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.schedule.learning_rate, betas=(0.9, 0.95), fused=True)

    @abstractmethod
    def build_tokenizer(self) -> PreTrainedTokenizerFast:
        """What is exported with the model."""

    @abstractmethod
    def loss(self, stage: int) -> torch.Tensor:
        """Loss of the batch of step ``self.step``; adds to what is reported."""

    @abstractmethod
    def report(self) -> str:
        """What the last steps were like, since the last report."""

    def run(self) -> None:
        ends = np.cumsum([stage.steps for stage in self.schedule.stages]).tolist()
        first_step, started, saved = self.step, time.monotonic(), time.monotonic()
        while self.step < self.schedule.num_steps:
            if self.step == self.stop_after:
                self._save()
                return
            stage = next(i for i, end in enumerate(ends) if self.step < end)
            self._learn(stage)
            if self.step % STEPS_PER_REPORT == 0 or self.step in ends:
                seconds = time.monotonic() - started
                print(
                    f"step {self.step}/{self.schedule.num_steps} length {self.schedule.stages[stage].length} "
                    f"{self.report()} minutes {seconds / 60:.1f} seconds/step {seconds / (self.step - first_step):.2f}",
                    flush=True,
                )
            if self.step in ends or time.monotonic() - saved > SECONDS_PER_CHECKPOINT:
                self._save()
                saved = time.monotonic()
            if self.step in ends:
                self.export()

    def _learn(self, stage: int) -> None:
        share = learning_rate(self.step, self.schedule.num_steps)
        for optimizer, peaks in zip(self.optimizers, self.peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * share
        loss = self.loss(stage)
        self.model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1

    def _save(self) -> None:
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        state = {"model": self.model.state_dict(), "optimizers": optimizers, "step": self.step}
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.checkpoint)

    def export(self) -> None:
        """Writes the model folder, in bfloat16."""
        copy.deepcopy(self.model).to("cpu", torch.bfloat16).save_pretrained(self.output)
        self.build_tokenizer().save_pretrained(self.output)


def training_parser(description: str | None) -> argparse.ArgumentParser:
    """Options that every training has: where to, which seed, on what."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="for work on the CPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    return parser
