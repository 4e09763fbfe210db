"""Transformers that read texts: encoders, decoders, and both."""

from __future__ import annotations

from typing import Any

from tests.coverage.case import (
    VOCABULARY,
    Case,
    Inputs,
    first,
    hugging_face,
    tokens,
    two_texts,
    unmasked,
)


def encoder(name: str, config: str, kind: str = "ForMaskedLM", **options: Any) -> Case:
    inputs = options.pop("inputs", tokens)
    quick, precise = options.pop("quick", False), options.pop("precise", True)
    build = hugging_face(f"{config}{kind}", config, **options)
    return Case(name, "encoders", build, inputs, first, quick, precise)


def decoder(name: str, config: str, kind: str = "ForCausalLM", **options: Any) -> Case:
    group = options.pop("group", "decoders")
    inputs = options.pop("inputs", tokens)
    quick, precise = options.pop("quick", False), options.pop("precise", True)
    build = hugging_face(f"{options.pop('prefix', config)}{kind}", config, **options)
    return Case(name, group, build, inputs, first, quick, precise)


def both(name: str, config: str, kind: str = "ForConditionalGeneration", **options: Any) -> Case:
    group, precise = options.pop("group", "encoder–decoders"), options.pop("precise", True)
    build = hugging_face(f"{config}{kind}", config, **{**_BOTH, **options})
    return Case(name, group, build, two_texts, first, precise=precise)


_BOTH = {
    "d_model": 16,
    "d_ff": 24,
    "d_kv": 8,
    "num_heads": 2,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "decoder_start_token_id": 1,
    "num_hidden_layers": 1,
}


def _boxed() -> Inputs:
    """A page: tokens and where they stand."""
    found = tokens()
    return {**found, "bbox": found["input_ids"][..., None].expand(-1, -1, 4).contiguous() % 20}


ENCODERS = [
    encoder("BERT", "Bert", quick=True),
    encoder("BERT, classes", "Bert", "ForSequenceClassification"),
    encoder("RoBERTa", "Roberta"),
    encoder("RoBERTa, norm first", "RobertaPreLayerNorm"),
    encoder("XLM-RoBERTa", "XLMRoberta"),
    encoder("XLM-RoBERTa-XL", "XLMRobertaXL"),
    encoder("CamemBERT", "Camembert"),
    encoder("DistilBERT", "DistilBert", dim=16, n_layers=2, n_heads=2, hidden_dim=24),
    encoder("ALBERT", "Albert", embedding_size=8),
    encoder("ELECTRA", "Electra", embedding_size=8),
    encoder("DeBERTa", "Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    encoder(
        "DeBERTa-v2/v3", "DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"],
        position_buckets=8, norm_rel_ebd="layer_norm", share_att_key=True,
    ),
    encoder("ModernBERT", "ModernBert", local_attention=4),
    encoder("MPNet", "MPNet"),
    encoder("Funnel", "Funnel", num_hidden_layers=..., block_sizes=[1, 1], d_model=16, n_head=2,
            d_head=8, d_inner=24),
    encoder("Longformer", "Longformer", precise=False, attention_window=4),
    encoder("BigBird", "BigBird", block_size=2, num_random_blocks=1),
    encoder("ConvBERT", "ConvBert", embedding_size=8, conv_kernel_size=3, head_ratio=1),
    encoder("ERNIE", "Ernie"),
    encoder("ESM", "Esm", mask_token_id=3, position_embedding_type="rotary"),
    encoder("FNet", "FNet", inputs=unmasked),
    encoder("MobileBERT", "MobileBert", embedding_size=8, intra_bottleneck_size=8),
    encoder("SqueezeBERT", "SqueezeBert", embedding_size=16),
    encoder("RoFormer", "RoFormer", embedding_size=16),
    encoder("Nyströmformer", "Nystromformer", num_landmarks=8, segment_means_seq_len=8),
    encoder("RemBERT", "RemBert", input_embedding_size=8, output_embedding_size=8),
    encoder("LayoutLM", "LayoutLM", inputs=_boxed),
    encoder("LayoutLMv3", "LayoutLMv3", "ForTokenClassification", inputs=_boxed,
            visual_embed=False, coordinate_size=3, shape_size=2),
    encoder("XLNet", "XLNet", "LMHeadModel", max_position_embeddings=..., d_model=16, n_layer=2,
            n_head=2, d_inner=24),
    encoder("Megatron-BERT", "MegatronBert"),
    encoder("Data2Vec (text)", "Data2VecText"),
    encoder("EuroBERT", "EuroBert"),
    encoder("Nomic BERT", "NomicBert"),
    encoder("I-BERT", "IBert"),
    encoder("LUKE", "Luke", "ForSequenceClassification", entity_vocab_size=10, entity_emb_size=8),
    encoder("CANINE", "Canine", "ForSequenceClassification", precise=False, num_hash_buckets=50,
            local_transformer_stride=4, downsampling_rate=4, upsampling_kernel_size=3),
    encoder("XLM", "XLM", "WithLMHeadModel", emb_dim=16, n_layers=2, n_heads=2, n_words=VOCABULARY),
    encoder("Reformer", "Reformer", "ModelWithLMHead", is_decoder=True,
            local_attention_probs_dropout_prob=0.0, attn_layers=["local"],
            attention_head_size=8, axial_pos_embds=False, local_attn_chunk_length=4,
            feed_forward_size=24),
    encoder("FlauBERT", "Flaubert", "WithLMHeadModel", emb_dim=16, n_layers=2, n_heads=2,
            n_words=VOCABULARY),
    encoder("X-MOD", "Xmod", default_language="en_XX"),
    encoder("RoCBert", "RoCBert", pronunciation_vocab_size=50, shape_vocab_size=50,
            pronunciation_embed_dim=8, shape_embed_dim=8),
    encoder("Splinter", "Splinter", "Model"),
    encoder("YOSO", "Yoso", use_expectation=True),
    encoder("Perceiver", "Perceiver", num_latents=4, d_latents=16, d_model=16, num_blocks=1,
            num_self_attends_per_block=1, num_self_attention_heads=2, num_cross_attention_heads=2,
            qk_channels=16, v_channels=16),
]  # fmt: skip

DECODERS = [
    decoder("GPT-2", "GPT2", "LMHeadModel", quick=True),
    decoder("GPT-2, classes", "GPT2", "ForSequenceClassification"),
    decoder("OpenAI GPT", "OpenAIGPT", "LMHeadModel"),
    decoder("GPT-Neo", "GPTNeo", attention_types=[[["global", "local"], 1]], window_size=4),
    decoder("GPT-NeoX", "GPTNeoX"),
    decoder("GPT-J", "GPTJ", rotary_dim=4),
    decoder("GPT-BigCode", "GPTBigCode"),
    decoder("CodeGen", "CodeGen", n_ctx=32, num_attention_heads=4, rotary_dim=4),
    decoder("CTRL", "CTRL", "LMHeadModel", dff=24),
    decoder("OPT", "OPT", ffn_dim=24, word_embed_proj_dim=8),
    decoder("XGLM", "XGLM", precise=False, d_model=16, num_layers=2, attention_heads=2, ffn_dim=24),
    decoder("BioGPT", "BioGpt"),
    decoder("Llama", "Llama", quick=True),
    decoder("Mistral", "Mistral", sliding_window=6),
    decoder("Ministral", "Ministral", head_dim=8, sliding_window=6),
    decoder("Qwen2", "Qwen2"),
    decoder("Qwen3", "Qwen3"),
    decoder("Gemma", "Gemma", head_dim=8),
    decoder("Gemma 2", "Gemma2", head_dim=8, sliding_window=6),
    decoder("Gemma 3", "Gemma3Text", prefix="Gemma3", head_dim=8, sliding_window=6),
    # Its norms take powers in float32, whose vectors and remainders round otherwise.
    decoder("Gemma 4", "Gemma4Text", prefix="Gemma4", precise=False, head_dim=8, global_head_dim=8,
            sliding_window=6, vocab_size_per_layer_input=VOCABULARY, hidden_size_per_layer_input=4,
            num_kv_shared_layers=0),
    decoder("VaultGemma", "VaultGemma", head_dim=8, sliding_window=6),
    decoder("Phi", "Phi", partial_rotary_factor=0.5),
    decoder("Phi-3", "Phi3"),
    decoder("Falcon", "Falcon"),
    decoder("Bloom", "Bloom"),
    decoder("MPT", "Mpt", d_model=16, n_heads=2, n_layers=2, max_seq_len=32),
    decoder("StableLM", "StableLm", qk_layernorm=True),
    decoder("OLMo", "Olmo"),
    decoder("OLMo 2", "Olmo2"),
    decoder("OLMo 3", "Olmo3", sliding_window=6),
    decoder("SmolLM3", "SmolLM3"),
    decoder("Cohere", "Cohere", use_qk_norm=True),
    decoder("Cohere 2", "Cohere2", sliding_window=6),
    decoder("Granite", "Granite"),
    decoder("StarCoder2", "Starcoder2"),
    decoder("Nemotron", "Nemotron"),
    decoder("Persimmon", "Persimmon"),
    decoder("GLM", "Glm", head_dim=8),
    decoder("GLM-4", "Glm4", head_dim=8),
    decoder("Helium", "Helium", head_dim=8),
    decoder("EXAONE 4", "Exaone4", sliding_window=6),
    decoder("ERNIE 4.5", "Ernie4_5", head_dim=8),
    decoder("Apertus", "Apertus"),
    decoder("Arcee", "Arcee"),
    decoder("DiffLlama", "DiffLlama", num_key_value_heads=2),
    decoder("nanochat", "NanoChat"),
    decoder("HunYuan", "HunYuanDenseV1", head_dim=8),
    decoder("Seed-OSS", "SeedOss", head_dim=8),
    decoder("BitNet", "BitNet"),
    decoder("ModernBERT decoder", "ModernBertDecoder", local_attention=4),
    decoder("BertGeneration", "BertGeneration", "Decoder", is_decoder=True),
]  # fmt: skip

BOTH = [
    both("T5", "T5"),
    both("T5 v1.1 (gated)", "T5", feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    both("mT5", "MT5"),
    both("UMT5", "UMT5"),
    both("LongT5", "LongT5", local_radius=3, global_block_size=2,
         encoder_attention_type="transient-global"),
    both("BART", "Bart"),
    both("mBART", "MBart"),
    both("Pegasus", "Pegasus"),
    both("PEGASUS-X", "PegasusX", block_size=4, num_global_tokens=2),
    both("Marian", "Marian", "MTModel", decoder_vocab_size=VOCABULARY),
    both("M2M-100", "M2M100"),
    both("Blenderbot", "Blenderbot"),
    both("Blenderbot small", "BlenderbotSmall"),
    both("LED", "LED", precise=False, attention_window=4, max_encoder_position_embeddings=32,
         max_decoder_position_embeddings=32),
    both("BigBird-Pegasus", "BigBirdPegasus", attention_type="original_full"),
    both("PLBART", "PLBart"),
    both("MVP", "Mvp"),
]  # fmt: skip

STATE_SPACE = [
    decoder("Mamba", "Mamba", group="state space", state_size=4, time_step_rank=2),
    decoder("Mamba-2", "Mamba2", group="state space", state_size=4, num_heads=4, head_dim=8,
            n_groups=1, chunk_size=4),
    decoder("FalconMamba", "FalconMamba", group="state space", state_size=4, time_step_rank=2),
    decoder("RWKV", "Rwkv", group="state space", attention_hidden_size=16, context_length=32,
            inputs=unmasked),
    decoder("RecurrentGemma", "RecurrentGemma", group="state space", lru_width=16,
            attention_window_size=4, num_hidden_layers=3, block_types=["recurrent", "attention"]),
    decoder("LFM2", "Lfm2", group="state space", layer_types=["conv", "full_attention"],
            block_multiple_of=8),
    decoder("Bamba", "Bamba", group="state space", mamba_n_heads=4, mamba_d_head=8, mamba_d_state=4,
            mamba_chunk_size=4, attn_layer_indices=[1]),
    decoder("Falcon-H1", "FalconH1", group="state space", head_dim=8, mamba_d_ssm=16,
            mamba_n_heads=2, mamba_d_head=8, mamba_d_state=4, mamba_chunk_size=4, mamba_n_groups=1),
    decoder("Jamba", "Jamba", group="state space", mamba_d_state=4, mamba_dt_rank=2,
            attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
            use_mamba_kernels=False, num_experts=4, num_experts_per_tok=2,
            experts_implementation="eager"),
]  # fmt: skip

_EXPERTS = {
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 12,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "experts_implementation": "eager",
}
EXPERTS = [
    decoder("Mixtral", "Mixtral", group="mixtures of experts", **_EXPERTS),
    decoder("Mixtral, grouped products", "Mixtral", group="mixtures of experts", precise=False,
            **{**_EXPERTS, "experts_implementation": "grouped_mm"}),
    decoder("Qwen2-MoE", "Qwen2Moe", group="mixtures of experts", **_EXPERTS),
    decoder("Qwen3-MoE", "Qwen3Moe", group="mixtures of experts", **_EXPERTS),
    decoder("OLMoE", "Olmoe", group="mixtures of experts", **_EXPERTS),
    decoder("gpt-oss", "GptOss", group="mixtures of experts", head_dim=8, sliding_window=6,
            **_EXPERTS),
    decoder("DeepSeek-V3", "DeepseekV3", group="mixtures of experts", precise=False,
            n_routed_experts=4,
            num_key_value_heads=2, n_group=1, topk_group=1, q_lora_rank=8, kv_lora_rank=8,
            qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, first_k_dense_replace=1,
            **_EXPERTS),
    decoder("DeepSeek-V2", "DeepseekV2", group="mixtures of experts", precise=False,
            n_routed_experts=4, num_key_value_heads=2, n_group=1, topk_group=1, q_lora_rank=8,
            kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
            first_k_dense_replace=1, **_EXPERTS),
    decoder("GLM-4 MoE", "Glm4Moe", group="mixtures of experts", precise=False, head_dim=8,
            n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1, **_EXPERTS),
    decoder("ERNIE 4.5 MoE", "Ernie4_5_Moe", group="mixtures of experts", precise=False,
            moe_num_experts=4, moe_k=2, moe_layer_start_index=1, moe_num_shared_experts=1,
            **_EXPERTS),
    decoder("Granite MoE", "GraniteMoe", group="mixtures of experts", **_EXPERTS),
    decoder("JetMoE", "JetMoe", group="mixtures of experts", kv_channels=8, num_key_value_heads=2,
            **_EXPERTS),
    decoder("Llama 4", "Llama4Text", prefix="Llama4", group="mixtures of experts", head_dim=8,
            intermediate_size_mlp=24, **_EXPERTS),
    both("NLLB-MoE", "NllbMoe", group="mixtures of experts", num_experts=2, encoder_sparse_step=1,
         decoder_sparse_step=1, expert_capacity=8),
    both("Switch Transformers", "SwitchTransformers", group="mixtures of experts", num_experts=2,
         num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, expert_capacity=8),
]  # fmt: skip
