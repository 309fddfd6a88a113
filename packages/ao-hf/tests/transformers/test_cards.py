"""What is uploaded: safetensors, configurations, and a card that says what was quantized."""

import shutil

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.errors import EntryNotFoundError
from transformers import AutoModelForCausalLM

from ao_core import FqnToConfig, quantize_
from ao_hf import AoConfig
from ao_quant import quantize_checkpoint

MINE = "---\nlicense: mit\nbase_model: up/stream\ntags: chat\n---\n\n# Mine\n\nAll that I know of it.\n"


@pytest.fixture
def model(dense):
    config = AoConfig(FqnToConfig({"lm_head": None, "*": "int4_weight_only"}))
    return AutoModelForCausalLM.from_pretrained(dense, quantization_config=config)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub in a folder, with the calls of HfApi that transformers makes."""
    home = tmp_path / "hub"

    class Api(huggingface_hub.HfApi):
        def create_repo(self, repo_id, *, token=None, private=None, exist_ok=False):
            (home / repo_id).mkdir(parents=True, exist_ok=exist_ok)
            return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")

        def create_commit(
            self, repo_id, operations, *, commit_message, commit_description=None, token=None,
            revision=None, create_pr=None,
        ):  # fmt: skip
            for operation in operations:
                shutil.copy(operation.path_or_fileobj, home / repo_id / operation.path_in_repo)
            return sorted(operation.path_in_repo for operation in operations)

    def load_card(repo_id, token=None):
        path = home / repo_id / "README.md"
        if not path.exists():
            raise EntryNotFoundError("404")
        return ModelCard(path.read_text())

    monkeypatch.setattr("transformers.utils.hub.hf_api", Api)
    monkeypatch.setattr("transformers.modeling_utils.hf_api", Api)
    monkeypatch.setattr("transformers.utils.hub.ModelCard.load", load_card)
    return home


FILES = ["README.md", "config.json", "generation_config.json", "model.safetensors"]


def test_what_push_to_hub_uploads(model, hub, tokens):
    assert model.push_to_hub("me/small-int4", tags=["tiny"]) == FILES
    card = ModelCard((hub / "me/small-int4/README.md").read_text())
    assert card.data.library_name == "transformers"
    assert card.data.tags == ["ao", "int4_weight_only", "tiny"]
    assert card.data.base_model is None  # a folder, whose path is nobody's business
    assert "More Information Needed" not in card.text
    assert str(hub.parent) not in card.content
    assert (
        "import ao_hf, transformers\nmodel = transformers.LlamaForCausalLM.from_pretrained("
        in card.text
    )
    assert "'me/small-int4'" in card.text
    again = AutoModelForCausalLM.from_pretrained(hub / "me/small-int4")
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_save_pretrained_may_push_too(model, hub, tmp_path):
    model.save_pretrained(tmp_path / "q", push_to_hub=True, repo_id="me/q", max_shard_size="8KB")
    names = sorted(file.name for file in (hub / "me/q").iterdir())
    shards = [name for name in names if name.startswith("model-")]
    assert names == [*FILES[:3], *shards, "model.safetensors.index.json"]
    assert len(shards) > 3
    assert "'me/q'" in (hub / "me/q/README.md").read_text()


def test_the_card_of_a_repository_keeps_its_text(model, hub):
    (hub / "me/mine").mkdir(parents=True)
    (hub / "me/mine/README.md").write_text(MINE)
    model.push_to_hub("me/mine")
    once = (hub / "me/mine/README.md").read_text()
    card = ModelCard(once)
    assert card.data.to_dict() == {
        "license": "mit", "base_model": "up/stream", "library_name": "transformers",
        "tags": ["chat", "ao", "int4_weight_only"],
    }  # fmt: skip
    assert card.text.startswith("\n# Mine\n\nAll that I know of it.\n\n<!-- ao")
    model.push_to_hub("me/mine")
    assert (hub / "me/mine/README.md").read_text() == once


def test_the_table(model, tmp_path, dense):
    model.save_pretrained(tmp_path / "q")
    rows = [line for line in (tmp_path / "q/README.md").read_text().splitlines() if "|" in line]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]
    (quantized,) = (row for row in cells if row[0].startswith("`"))
    # 2 layers of q, o (48 x 48), k, v (24 x 48), gate, up, down (80 x 48)
    weights = 2 * (2 * 48 * 48 + 2 * 24 * 48 + 3 * 80 * 48)
    assert quantized[1:4] == ["14", f"{weights:,}", "147.5 kB"]
    kept = {row[0] for row in cells if row[0].startswith("kept")}
    assert any("embeddings are kept" in row for row in kept)
    assert any("the configuration keeps 'lm_head'" in row for row in kept)
    assert cells[-1][:2] == ["all", "21"]


def test_a_second_quantization_and_none(dense, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(dense)
    quantize_(model, FqnToConfig({"re:.*mlp.*": "int8_weight_only"}))
    quantize_(model, FqnToConfig({"re:.*self_attn.*": "int4_weight_only"}))
    model.save_pretrained(tmp_path / "q")
    text = (tmp_path / "q/README.md").read_text()
    assert ModelCard(text).data.tags == ["ao", "int8_weight_only", "int4_weight_only"]
    model.dequantize()
    model.save_pretrained(tmp_path / "dense again")
    assert not (tmp_path / "dense again/README.md").exists()


@pytest.mark.parametrize(
    ("there", "kept"),
    [
        (MINE, "# Mine\n\nAll that I know of it.\n"),
        ("Only text\n", "Only text\n"),
        ("---\n[broken\n---\ntext\n", "---\n[broken\n---\ntext\n"),
        ("---\r\nlicense: mit\r\n---\r\ntext\r\n", "text"),
    ],
)
def test_quantizing_files_keeps_the_card_that_is_copied(dense, tmp_path, there, kept):
    (dense / "README.md").write_text(there, newline="")
    quantize_checkpoint(dense, tmp_path / "q", "int8_weight_only")
    text = (tmp_path / "q/README.md").read_text()
    assert (dense / "README.md").read_bytes() == there.encode()
    assert kept in text
    assert text.count("## Quantization") == 1
    if "broken" not in there:
        assert "int8_weight_only" in ModelCard(text).data.tags
    # of what is quantized already: one section, on what it is now
    quantize_checkpoint(tmp_path / "q", tmp_path / "again", "int4_weight_only")
    again = (tmp_path / "again/README.md").read_text()
    assert again.count("## Quantization") == 1
    assert kept in again


def test_a_card_that_is_no_text(dense, tmp_path):
    (dense / "README.md").write_bytes(b"\xff\xfe\x00")
    with pytest.warns(UserWarning, match="no model card is written"):
        quantize_checkpoint(dense, tmp_path / "q", "int8_weight_only")
    assert (tmp_path / "q/README.md").read_bytes() == b"\xff\xfe\x00"
