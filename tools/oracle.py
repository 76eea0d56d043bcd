#!/usr/bin/env python3
"""What Hugging Face transformers computes for a checkpoint, for tests/data/oracles.

  python3 -m venv V && V/bin/pip install torch transformers==5.17.*
  V/bin/python tools/oracle.py make FAMILY DIR          # a tiny random checkpoint
  V/bin/python tools/oracle.py fp8 FROM DIR             # its fp8 form: e4m3, 128 x 128 blocks
  V/bin/python tools/oracle.py f32 FROM DIR             # in float32, of weights that bf16 does not hold
  V/bin/python tools/oracle.py mtp FROM DIR             # with a layer that drafts, of layer 2's tensors
  V/bin/python tools/oracle.py chat FILE                # tests/data/oracles/chat.json: what templates render
  V/bin/python tools/oracle.py run DIR --experts int4-row --dense int8-row --out FILE

Of an fp8 checkpoint `host convert` rounds the dense part to bf16: `run --dense bf16` is its oracle.

`run` computes in float32 on the CPU with eager attention and no cache, after weights went through
the rules that --experts and --dense name. Where the checkpoint has a layer that drafts, which
transformers leaves out, two drafts after the first greedy token are computed here. Of equal values torch.topk takes the first.
"""

import argparse
import copy
import json
import os
import shutil

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.utils.chat_template_utils import render_jinja_template


def first_of_equals(x, k, dim=-1, largest=True, sorted=True):
    assert largest
    values, order = torch.sort(x, dim=dim, descending=True, stable=True)
    values, order = values.narrow(dim, 0, k), order.narrow(dim, 0, k)
    return torch.return_types.topk((values, order))


torch.topk = first_of_equals
torch.Tensor.topk = first_of_equals

FAMILIES = {
    "glm_moe_dsa": dict(
        vocab_size=256, hidden_size=64, intermediate_size=128, moe_intermediate_size=64,
        num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1,
        n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1, kv_lora_rank=32,
        q_lora_rank=48, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32,
        routed_scaling_factor=2.5, norm_topk_prob=True, max_position_embeddings=512,
        mlp_layer_types=["dense"] + ["sparse"] * 4, index_topk=16, index_head_dim=32, index_n_heads=4,
        indexer_types=["full", "full", "full", "shared", "shared"], eos_token_id=None,
        bos_token_id=None, pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 8000000.0},
    ),
    "glm4_moe_lite": dict(
        vocab_size=256, hidden_size=64, intermediate_size=128, moe_intermediate_size=64,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1,
        n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, kv_lora_rank=32,
        q_lora_rank=48, qk_rope_head_dim=16, qk_nope_head_dim=24, v_head_dim=32,
        routed_scaling_factor=1.8, norm_topk_prob=True, max_position_embeddings=512,
        mlp_layer_types=["dense", "sparse", "sparse"], eos_token_id=None, bos_token_id=None,
        pad_token_id=None, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    ),
    "qwen3_moe": dict(
        vocab_size=256, hidden_size=64, intermediate_size=128, moe_intermediate_size=64,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=1,
        mlp_only_layers=[0], max_position_embeddings=512, tie_word_embeddings=False,
        eos_token_id=None, bos_token_id=None, pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    ),
}


def make(args):
    torch.manual_seed(args.seed)
    config = transformers.AutoConfig.for_model(args.family, **FAMILIES[args.family])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.copy_(1 + 0.2 * torch.randn_like(p))
            elif name.endswith("bias"):
                p.copy_(0.1 * torch.randn_like(p))
            else:
                # Wide enough that layers matter and the router's choices differ.
                p.copy_(torch.randn_like(p) * (1.0 / p.shape[-1] ** 0.5 if "embed" not in name else 1.0))
        for name, b in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                b.copy_(0.05 * torch.randn_like(b))
    model.to(torch.bfloat16).save_pretrained(args.dir)


def blocks(scale, shape, block=128):
    wide = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
    return wide[: shape[0], : shape[1]]


def is_matrix(name, t):
    """What fp8 checkpoints and containers quantise: no norms, routers or indexer weights."""
    kept = ("norm", "mlp.gate.", "weights_proj", "bias")
    return t.dim() == 2 and not any(k in name for k in kept)


def fp8(args):
    os.makedirs(args.dir, exist_ok=True)
    out = {}
    for name, t in load_file(os.path.join(args.source, "model.safetensors")).items():
        if not is_matrix(name, t) or name.startswith(("model.embed", "lm_head")):
            out[name] = t
            continue
        w = t.float()
        r, c = -(-w.shape[0] // 128), -(-w.shape[1] // 128)
        padded = torch.zeros(r * 128, c * 128)
        padded[: w.shape[0], : w.shape[1]] = w
        amax = padded.view(r, 128, c, 128).abs().amax(dim=(1, 3))
        scale = amax / 448
        out[name] = (w / blocks(scale, w.shape)).to(torch.float8_e4m3fn)
        out[name + "_scale_inv"] = scale
    save_file(out, os.path.join(args.dir, "model.safetensors"), metadata={"format": "pt"})
    for f in os.listdir(args.source):
        if f.endswith(".json") and f != "config.json":
            shutil.copy(os.path.join(args.source, f), args.dir)
    config = json.load(open(os.path.join(args.source, "config.json")))
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    json.dump(config, open(os.path.join(args.dir, "config.json"), "w"), indent=2)


def f32(args):
    """The lower halves of weights that were bf16 are 40503 i + 12345 modulo 2^16, i an element's number."""
    os.makedirs(args.dir, exist_ok=True)
    out = {}
    for name, t in load_file(os.path.join(args.source, "model.safetensors")).items():
        if t.dtype == torch.bfloat16:
            low = (torch.arange(t.numel(), dtype=torch.int64) * 40503 + 12345) & 0xFFFF
            high = t.float().flatten().view(torch.int32)
            t = (high | low.to(torch.int32)).view(torch.float32).view(t.shape)
        out[name] = t
    save_file(out, os.path.join(args.dir, "model.safetensors"), metadata={"format": "pt"})
    config = json.load(open(os.path.join(args.source, "config.json")))
    config["dtype"] = "float32"
    json.dump(config, open(os.path.join(args.dir, "config.json"), "w"), indent=2)


def mtp(args):
    os.makedirs(args.dir, exist_ok=True)
    config = json.load(open(os.path.join(args.source, "config.json")))
    tensors = load_file(os.path.join(args.source, "model.safetensors"))
    n = config["num_hidden_layers"]
    layer = "model.layers.%s."
    for name in list(tensors):
        if name.startswith(layer % 2):
            tensors[layer % n + name.removeprefix(layer % 2)] = tensors[name].clone()
    for part, like in (
        ("eh_proj", "0.mlp.down_proj"), ("enorm", "1.input_layernorm"),
        ("hnorm", "2.input_layernorm"), ("shared_head.norm", "1.post_attention_layernorm"),
    ):
        tensors[layer % n + part + ".weight"] = tensors[f"model.layers.{like}.weight"].clone()
    save_file(tensors, os.path.join(args.dir, "model.safetensors"), metadata={"format": "pt"})
    config["num_nextn_predict_layers"] = 1
    json.dump(config, open(os.path.join(args.dir, "config.json"), "w"), indent=2)


def chat(args):
    oracle = json.load(open(args.file))
    tokens = {k: v["content"] if isinstance(v, dict) else v for k, v in oracle["tokens"].items() if v}
    for case in oracle["cases"]:
        texts, _ = render_jinja_template(
            [oracle["talks"][case["talk"]]], chat_template=oracle["templates"][case["template"]],
            add_generation_prompt=True, enable_thinking=case["thinking"], **tokens)
        case["text"] = texts[0]
    oracle["made_with"] = f"transformers {transformers.__version__}"
    json.dump(oracle, open(args.file, "w"), indent=1, ensure_ascii=False)


def integers(w, most, group):
    """q * s with s = max(amax / most, 1e-8) of each `group` columns, in float32."""
    shape = w.shape
    w = w.contiguous().view(-1, min(group or shape[-1], shape[-1]))
    s = torch.clamp(w.abs().amax(dim=-1, keepdim=True) / most, min=1e-8)
    return (torch.clamp(torch.round(w / s), -most - 1, most) * s).view(shape)


RULES = {
    "verbatim": lambda w: w,
    "int4-row": lambda w: integers(w, 7.0, None),
    "int4-g64": lambda w: integers(w, 7.0, 64),
    "int8-row": lambda w: integers(w, 127.0, None),
}


def load(args):
    """The model in float32; an fp8 checkpoint is widened first, weight times scale."""
    tensors = load_file(os.path.join(args.dir, "model.safetensors"))
    if not any(t.dtype == torch.float8_e4m3fn for t in tensors.values()):
        return transformers.AutoModelForCausalLM.from_pretrained(
            args.dir, dtype=torch.float32, attn_implementation="eager")
    wide = {}
    for name, t in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        scale = tensors.get(name + "_scale_inv")
        wide[name] = t.float() if scale is None else t.float() * blocks(scale, t.shape)
        if scale is not None and ".mlp.experts." not in name and args.dense == "bf16":
            wide[name] = wide[name].bfloat16().float()
    folder = args.dir.rstrip("/") + ".wide"
    os.makedirs(folder, exist_ok=True)
    save_file(wide, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    config = json.load(open(os.path.join(args.dir, "config.json")))
    config.pop("quantization_config")
    json.dump(config, open(os.path.join(folder, "config.json"), "w"))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager")
    shutil.rmtree(folder)
    return model


class Drafts:
    """The layer after the last: eh_proj [enorm(embedding of the next token); hnorm(hidden state)], a
    layer like the others, shared_head.norm, the model's head. A further draft takes what the norm
    gave for the hidden state."""

    def __init__(self, model, args):
        n = model.config.num_hidden_layers
        prefix = f"model.layers.{n}."
        tensors = load_file(os.path.join(args.dir, "model.safetensors"))
        own = {k.removeprefix(prefix): t.float() for k, t in tensors.items() if k.startswith(prefix)}
        norm = torch.nn.RMSNorm
        self.norms = {}
        for part in ("enorm", "hnorm"):
            self.norms[part] = norm(model.config.hidden_size, eps=model.config.rms_norm_eps)
            self.norms[part].weight.data = own.pop(part + ".weight")
        self.project = own.pop("eh_proj.weight")
        self.head = model.lm_head
        self.embed = model.model.embed_tokens
        self.stack = copy.deepcopy(model.model)
        self.stack.norm.weight.data = own.pop("shared_head.norm.weight")
        block = self.stack.layers[2]
        block.self_attn.layer_idx = 0
        experts = range(model.config.n_routed_experts)
        part = lambda e, kind: own.pop(f"mlp.experts.{e}.{kind}_proj.weight")
        fused = [torch.cat([part(e, "gate"), part(e, "up")]) for e in experts]
        rule = RULES[args.experts]
        own["mlp.experts.gate_up_proj"] = rule(torch.stack(fused))
        own["mlp.experts.down_proj"] = rule(torch.stack([part(e, "down") for e in experts]))
        block.load_state_dict(own)
        self.stack.layers = torch.nn.ModuleList([block])
        self.stack.config.num_hidden_layers = 1

    def run(self, hidden, following, count):
        drafts, logits = [], []
        for _ in range(count):
            x = [self.norms["enorm"](self.embed(torch.tensor(following))), self.norms["hnorm"](hidden)]
            x = torch.cat(x, dim=-1) @ self.project.T
            out = self.stack(inputs_embeds=x[None], use_cache=False).last_hidden_state[0, -1:]
            logits.append(self.head(out)[0])
            drafts.append(int(first_of_equals(logits[-1], 1).indices[0]))
            following = following + drafts[-1:]
            hidden = torch.cat([hidden, out])
        return {"drafts": drafts, "draft_logits": [[short(x) for x in l] for l in logits]}


def short(x):
    return float(f"{float(x):.7g}")


@torch.no_grad()
def run(args):
    model = load(args).eval()
    for name, p in model.named_parameters():
        if ".mlp.experts." in name:
            p.copy_(RULES[args.experts](p))
        elif is_matrix(name, p) and args.dense not in ("verbatim", "bf16"):
            p.copy_(RULES[args.dense](p))
    vocab = model.config.vocab_size
    drafts = Drafts(model, args) if getattr(model.config, "num_nextn_predict_layers", 0) else None
    rng = np.random.default_rng(args.seed)
    cases = []
    for n in args.lengths:
        ids = [int(i) for i in rng.integers(0, vocab, n)]
        case = {"input_ids": ids}
        if args.like:
            ids = json.load(open(args.like))["cases"][len(cases)]["input_ids"]
            case["input_ids"] = ids
        seen, greedy, margins = list(ids), [], []
        for step in range(args.greedy):
            out = model(torch.tensor([seen]), use_cache=False, output_hidden_states=step == 0)
            logits = out.logits[0, -1]
            if step == 0:
                case["last_logits"] = [short(x) for x in logits]
                if len(ids) <= 8:
                    case["hidden_last_token"] = [
                        [short(x) for x in h[0, -1]] for h in out.hidden_states]
            best = first_of_equals(logits, 2)
            greedy.append(int(best.indices[0]))
            margins.append(short(best.values[0] - best.values[1]))
            seen.append(greedy[-1])
            if step == 0 and drafts:
                case |= drafts.run(out.hidden_states[-1][0], ids[1:] + greedy, 2)
        case |= {"greedy": greedy, "greedy_margin": margins}
        cases.append(case)
    made = f"transformers {transformers.__version__} on the CPU, float32, eager attention, no cache"
    name = os.path.basename(args.dir.rstrip("/"))
    oracle = {"model": name, "experts": args.experts, "dense": args.dense, "made_with": made,
              "cases": cases}
    json.dump(oracle, open(args.out, "w"), separators=(",", ":"))


parser = argparse.ArgumentParser(description=__doc__,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
sub = parser.add_subparsers(required=True)
p = sub.add_parser("make")
p.add_argument("family", choices=FAMILIES)
p.add_argument("dir")
p.add_argument("--seed", type=int, default=1)
p.set_defaults(do=make)
p = sub.add_parser("fp8")
p.add_argument("source")
p.add_argument("dir")
p.set_defaults(do=fp8)
p = sub.add_parser("f32")
p.add_argument("source")
p.add_argument("dir")
p.set_defaults(do=f32)
p = sub.add_parser("mtp")
p.add_argument("source")
p.add_argument("dir")
p.set_defaults(do=mtp)
p = sub.add_parser("chat")
p.add_argument("file")
p.set_defaults(do=chat)
p = sub.add_parser("run")
p.add_argument("dir")
p.add_argument("--experts", choices=RULES, default="int4-row")
p.add_argument("--dense", choices=[*RULES, "bf16"], default="verbatim")
p.add_argument("--lengths", type=int, nargs="+", default=[1, 7, 40, 90])
p.add_argument("--greedy", type=int, default=24)
p.add_argument("--like", help="an oracle whose prompts to take")
p.add_argument("--seed", type=int, default=2)
p.add_argument("--out", required=True)
p.set_defaults(do=run)
args = parser.parse_args()
args.do(args)
