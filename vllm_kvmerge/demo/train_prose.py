"""Trains the prose model from scratch: ``python -m vllm_kvmerge.demo.train_prose --packages DIR --output DIR``.

A small Llama that reads the manuals of ``prose`` in byte-pair tokens; nothing in it is planted. Needs PyTorch,
Transformers and Tokenizers, and no vLLM. An interrupted run goes on where it stopped (``training``). The seed decides
the weights at the start and which text is read when; tokenizer and held-out pages do not depend on it.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from vllm_kvmerge.demo.muon import Muon
from vllm_kvmerge.demo.prose import Page, read_pages
from vllm_kvmerge.demo.training import Schedule, Stage, TrainingRun, training_parser

SPECIAL_TOKENS = ("<pad>", "<unk>", "<s>", "</s>")
BOS, EOS = 2, 3
VOCABULARY_SIZE = 2_048
MAX_POSITIONS = 4_096
MATRICES_LEARNING_RATE = 0.02
"""Muon's peak, for the matrices of layers; the schedule's is AdamW's, for embeddings and norms."""
SHORTEST_PASSAGE = 16
"""Tokens that are repeated, at least."""
SCHEDULE = Schedule(
    tokens_per_step=2_048, learning_rate=3e-3,
    stages=(
        Stage(256, 200),
        Stage(256, 1_100, repeats=True), Stage(1_024, 100, repeats=True), Stage(4_096, 40, repeats=True),
        Stage(4_096, 350),
    ),
)  # fmt: skip


def train_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Byte-pair encoding of bytes, learnt from the texts; digits are single, ``<s>`` is put in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def build_model() -> LlamaForCausalLM:
    """850,000 parameters: three layers of four query heads and two KV heads of 32, random weights.

    Biases of queries and keys are random too: with RoPE, they alone let the first layer tell near from far, because
    embeddings, which start out unlike each other, have nothing in common that a position could turn.
    """
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=MAX_POSITIONS,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            attention_bias=True,
            initializer_range=0.05,
            tie_word_embeddings=True,
            bos_token_id=BOS,
            eos_token_id=EOS,
            pad_token_id=0,
        )
    )
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            torch.nn.init.normal_(projection.bias)
    return model


def tokens_of(pages: Sequence[Page], tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """``[N]`` int64: the tokens of all pages, each followed by ``</s>``."""
    encoded = tokenizer.backend_tokenizer.encode_batch([page.text for page in pages], add_special_tokens=False)
    return np.concatenate([np.array([*one.ids, EOS]) for one in encoded])


def draw_batch(
    text: np.ndarray, seed: int, step: int, stage: int, schedule: Schedule = SCHEDULE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, ``[batch, length]`` int64: windows that begin with ``<s>`` and then anywhere in a page that
    goes on for as long as the window.

    In a stage that ``repeats``, a window's first tokens, ``SHORTEST_PASSAGE`` to half of it, come again and again up to
    its end.

    text: ``tokens_of`` pages, one of which at least has ``length`` tokens.
    """
    rng = np.random.default_rng((seed, step))
    drawn = schedule.draw_stage(rng, stage)
    length = drawn.length
    windows: list[np.ndarray] = []
    while len(windows) < schedule.batch_size(length):
        start = rng.integers(0, len(text) - length + 1)
        window = text[start : start + length]
        if EOS not in window[:-1]:
            passage = rng.integers(SHORTEST_PASSAGE, length // 2 + 1) if drawn.repeats else length
            windows.append(np.resize(window[:passage], length))
    targets = torch.from_numpy(np.stack(windows))
    beginning = torch.full((len(windows), 1), BOS)
    return torch.cat([beginning, targets[:, :-1]], dim=1), targets


class ProseTrainer(TrainingRun):
    """Trains on the pages that are not held out; reports nats per token.

    text: ``tokens_of`` these pages.
    """

    def __init__(
        self,
        text: np.ndarray,
        tokenizer: PreTrainedTokenizerFast,
        output: Path,
        seed: int,
        device: str,
        stop_after: int | None = None,
        schedule: Schedule = SCHEDULE,
    ) -> None:
        self.text, self.tokenizer = text, tokenizer
        super().__init__(schedule, output, seed, device, stop_after)
        self._losses: list[float] = []

    def build_model(self) -> LlamaForCausalLM:
        return build_model()

    def build_optimizers(self) -> list[torch.optim.Optimizer]:
        matrices = [weight for weight in self.model.model.layers.parameters() if weight.ndim == 2]
        others = [*self.model.model.embed_tokens.parameters(), *(p for p in self.model.parameters() if p.ndim == 1)]
        return [Muon(matrices, MATRICES_LEARNING_RATE), self.adamw(others)]

    def build_tokenizer(self) -> PreTrainedTokenizerFast:
        return self.tokenizer

    def loss(self, stage: int) -> torch.Tensor:
        inputs, targets = (t.to(self.device) for t in draw_batch(self.text, self.seed, self.step, stage, self.schedule))
        # Processors without bfloat16 instructions emulate them, at a twentieth of the speed.
        with torch.autocast(self.device, torch.bfloat16) if self.device == "cuda" else nullcontext():
            logits = self.model(inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        self._losses.append(loss.item())
        return loss

    def report(self) -> str:
        loss = sum(self._losses) / len(self._losses)
        self._losses.clear()
        return f"text {loss:.3f}"


def main() -> None:
    parser = training_parser(__doc__)
    parser.add_argument("--packages", type=Path, required=True, help="folder that Debian's packages are unpacked in")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    pages = [page for page in read_pages(arguments.packages) if not page.is_held_out]
    tokenizer = train_tokenizer([page.text for page in pages])
    text = tokens_of(pages, tokenizer)
    print(f"{len(pages)} pages, {len(text)} tokens", flush=True)
    ProseTrainer(text, tokenizer, arguments.output, arguments.seed, arguments.device).run()


if __name__ == "__main__":
    main()
