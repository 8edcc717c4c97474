"""Which tensors a model consists of: names, shapes and roles, without reading one.

Made from a `ModelConfig`, a `WeightNaming` and the names in a checkpoint; checked against the headers before anything
is loaded, so a damaged or foreign checkpoint is refused at once. `weights.py` reads what is planned here, `sizing.py`
adds it up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from twofold.api.errors import ModelLoadError
from twofold.models.config import ModelConfig
from twofold.weights.tensor_source import TensorSource


@dataclass(frozen=True)
class WeightNaming:
    """How an architecture's checkpoints call the parts of a mixture layer; the rest is the same for all so far.

    `moe_blocks` are the module names under `model.layers.N.`, `expert_projections` the (gate, up, down) names under
    `experts.E.`; the first combination that the checkpoint has is taken. Fused experts (`experts.gate_up_proj`
    [E, 2I, H] and `experts.down_proj` [E, H, I], as transformers 5 keeps them) and stacked ones (`experts.gate_proj`,
    `experts.up_proj`, `experts.down_proj`, each [E, ...], as GGUF files keep them) are known for every block.
    """

    moe_blocks: tuple[str, ...]
    expert_projections: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's name in the checkpoint and the shape it must have."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class AttentionPlan:
    norm: TensorSpec
    q: TensorSpec
    k: TensorSpec
    v: TensorSpec
    o: TensorSpec
    biases: tuple[TensorSpec, ...]
    """Of q, k, v and o, or none."""
    head_norms: tuple[TensorSpec, ...]
    """Of q and k, or none."""


@dataclass(frozen=True)
class DensePlan:
    """A plain SiLU-gated feed-forward layer."""

    norm: TensorSpec
    gate: TensorSpec
    up: TensorSpec
    down: TensorSpec


@dataclass(frozen=True)
class SeparateExperts:
    """One (gate [I, H], up [I, H], down [H, I]) per expert."""

    experts: tuple[tuple[TensorSpec, TensorSpec, TensorSpec], ...]


@dataclass(frozen=True)
class FusedExperts:
    """All experts of a layer in two tensors."""

    gate_up: TensorSpec
    down: TensorSpec


@dataclass(frozen=True)
class StackedExperts:
    """All experts of a layer in three tensors."""

    gate: TensorSpec
    up: TensorSpec
    down: TensorSpec


Experts = SeparateExperts | FusedExperts | StackedExperts


@dataclass(frozen=True)
class MoePlan:
    norm: TensorSpec
    router: TensorSpec
    experts: Experts


@dataclass(frozen=True)
class LayerPlan:
    attention: AttentionPlan
    feed_forward: DensePlan | MoePlan

    def dense_tensors(self) -> Iterator[TensorSpec]:
        """Everything but the experts' matrices."""
        yield from _attention_tensors(self.attention)
        ffn = self.feed_forward
        yield from (
            (ffn.norm, ffn.router) if isinstance(ffn, MoePlan) else (ffn.norm, ffn.gate, ffn.up, ffn.down)
        )


@dataclass(frozen=True)
class WeightPlan:
    embedding: TensorSpec
    layers: tuple[LayerPlan, ...]
    final_norm: TensorSpec
    lm_head: TensorSpec | None
    """None when tied to the embedding."""

    def dense_tensors(self) -> Iterator[TensorSpec]:
        """Everything but the experts' matrices."""
        yield self.embedding
        for layer in self.layers:
            yield from layer.dense_tensors()
        yield self.final_norm
        if self.lm_head is not None:
            yield self.lm_head

    def expert_tensors(self) -> Iterator[TensorSpec]:
        """The experts' matrices."""
        for layer in self.layers:
            if isinstance(layer.feed_forward, MoePlan):
                yield from expert_tensors(layer.feed_forward.experts)


def expert_tensors(experts: Experts) -> Iterator[TensorSpec]:
    """The tensors of one layer's experts."""
    if isinstance(experts, FusedExperts):
        yield from (experts.gate_up, experts.down)
    elif isinstance(experts, StackedExperts):
        yield from (experts.gate, experts.up, experts.down)
    else:
        yield from chain.from_iterable(experts.experts)


def expert_formats(experts: Experts, tensors: TensorSource) -> tuple[str, str, str]:
    """Formats of the (gate, up, down) matrices of one layer's experts, which agree; nothing is read."""
    specs: tuple[TensorSpec, TensorSpec, TensorSpec]
    if isinstance(experts, FusedExperts):
        specs = (experts.gate_up, experts.gate_up, experts.down)
    elif isinstance(experts, StackedExperts):
        specs = (experts.gate, experts.up, experts.down)
    else:
        specs = experts.experts[0]
    gate, up, down = (tensors.check(spec.name, spec.shape) for spec in specs)
    return gate, up, down


def make_plan(config: ModelConfig, naming: WeightNaming, tensors: TensorSource) -> WeightPlan:
    """The plan of `config` in the names this checkpoint uses, checked against its headers.

    Raises ModelLoadError for a tensor that is missing, has the wrong dtype or shape, or that the architecture does not
    have: to leave out a bias or a scale silently would give wrong answers.
    """
    plan = WeightPlan(
        embedding=TensorSpec("model.embed_tokens.weight", (config.vocab_size, config.hidden_size)),
        layers=tuple(_plan_layer(config, naming, tensors, layer) for layer in range(config.num_layers)),
        final_norm=TensorSpec("model.norm.weight", (config.hidden_size,)),
        lm_head=None
        if config.tie_word_embeddings
        else TensorSpec("lm_head.weight", (config.vocab_size, config.hidden_size)),
    )
    planned: set[str] = set()
    for spec in chain(plan.dense_tensors(), plan.expert_tensors()):
        tensors.check(spec.name, spec.shape)
        planned.update((spec.name, *tensors.companions(spec.name)))
    _check_expert_formats(plan, tensors)
    unknown = [name for name in tensors if name not in planned and not _is_harmless(name, config)]
    if unknown:
        raise ModelLoadError(
            f"{tensors.entry(unknown[0]).file}: tensor {unknown[0]} ({len(unknown)} such in all) is not part of "
            f"{config.architecture} as its configuration describes it; use the one that belongs to these weights"
        )
    return plan


def _check_expert_formats(plan: WeightPlan, tensors: TensorSource) -> None:
    """The experts of a layer must agree, matrix by matrix: the offsets inside an expert are the layer's."""
    for layer in plan.layers:
        if not isinstance(layer.feed_forward, MoePlan):
            continue
        experts = layer.feed_forward.experts
        if not isinstance(experts, SeparateExperts):
            continue
        for of_one_kind in zip(*experts.experts, strict=True):
            first = tensors.entry(of_one_kind[0].name)
            for spec in of_one_kind:
                entry = tensors.entry(spec.name)
                if entry.format != first.format:
                    raise ModelLoadError(
                        f"{entry.file}: tensor {spec.name} is {entry.dtype}, expected {first.dtype} as {first.name} "
                        "is, because the experts of a layer share one format; convert the checkpoint to one"
                    )


def _is_harmless(name: str, config: ModelConfig) -> bool:
    """Tensors that carry no information of their own: old checkpoints' RoPE tables, a tied head written out."""
    return name.endswith(".rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight")


def _attention_tensors(plan: AttentionPlan) -> Iterator[TensorSpec]:
    yield from (plan.norm, plan.q, plan.k, plan.v, plan.o)
    yield from plan.biases
    yield from plan.head_norms


def _plan_layer(config: ModelConfig, naming: WeightNaming, tensors: TensorSource, layer: int) -> LayerPlan:
    prefix = f"model.layers.{layer}"
    hidden = config.hidden_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = (("q", q_size), ("k", kv_size), ("v", kv_size), ("o", hidden))
    attention = AttentionPlan(
        norm=TensorSpec(f"{prefix}.input_layernorm.weight", (hidden,)),
        q=TensorSpec(f"{prefix}.self_attn.q_proj.weight", (q_size, hidden)),
        k=TensorSpec(f"{prefix}.self_attn.k_proj.weight", (kv_size, hidden)),
        v=TensorSpec(f"{prefix}.self_attn.v_proj.weight", (kv_size, hidden)),
        o=TensorSpec(f"{prefix}.self_attn.o_proj.weight", (hidden, q_size)),
        biases=tuple(
            TensorSpec(f"{prefix}.self_attn.{name}_proj.bias", (size,)) for name, size in projections
        )
        if config.attention_bias
        else (),
        head_norms=tuple(
            TensorSpec(f"{prefix}.self_attn.{name}_norm.weight", (config.head_dim,)) for name in "qk"
        )
        if config.qk_norm
        else (),
    )
    norm = TensorSpec(f"{prefix}.post_attention_layernorm.weight", (hidden,))
    if layer in config.moe_layers:
        return LayerPlan(attention, _plan_moe(config, naming, tensors, prefix, norm))
    inner = config.intermediate_size
    dense = DensePlan(
        norm=norm,
        gate=TensorSpec(f"{prefix}.mlp.gate_proj.weight", (inner, hidden)),
        up=TensorSpec(f"{prefix}.mlp.up_proj.weight", (inner, hidden)),
        down=TensorSpec(f"{prefix}.mlp.down_proj.weight", (hidden, inner)),
    )
    return LayerPlan(attention, dense)


def _plan_moe(
    config: ModelConfig, naming: WeightNaming, tensors: TensorSource, prefix: str, norm: TensorSpec
) -> MoePlan:
    hidden, inner, num_experts = config.hidden_size, config.moe_intermediate_size, config.num_experts
    block = next((name for name in naming.moe_blocks if f"{prefix}.{name}.gate.weight" in tensors), None)
    block = f"{prefix}.{block or naming.moe_blocks[0]}"
    router = TensorSpec(f"{block}.gate.weight", (num_experts, hidden))
    if f"{block}.experts.gate_up_proj" in tensors:
        fused = FusedExperts(
            gate_up=TensorSpec(f"{block}.experts.gate_up_proj", (num_experts, 2 * inner, hidden)),
            down=TensorSpec(f"{block}.experts.down_proj", (num_experts, hidden, inner)),
        )
        return MoePlan(norm, router, fused)
    if f"{block}.experts.gate_proj" in tensors:
        stacked = StackedExperts(
            gate=TensorSpec(f"{block}.experts.gate_proj", (num_experts, inner, hidden)),
            up=TensorSpec(f"{block}.experts.up_proj", (num_experts, inner, hidden)),
            down=TensorSpec(f"{block}.experts.down_proj", (num_experts, hidden, inner)),
        )
        return MoePlan(norm, router, stacked)
    gate, up, down = next(
        (names for names in naming.expert_projections if f"{block}.experts.0.{names[0]}.weight" in tensors),
        naming.expert_projections[0],
    )
    for expert in range(num_experts):  # a wrong number of experts ends here, before a plan of them is made
        tensors.entry(f"{block}.experts.{expert}.{gate}.weight")
    separate = tuple(
        (
            TensorSpec(f"{block}.experts.{expert}.{gate}.weight", (inner, hidden)),
            TensorSpec(f"{block}.experts.{expert}.{up}.weight", (inner, hidden)),
            TensorSpec(f"{block}.experts.{expert}.{down}.weight", (hidden, inner)),
        )
        for expert in range(num_experts)
    )
    return MoePlan(norm, router, SeparateExperts(separate))
