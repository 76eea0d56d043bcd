//! Every kernel, once: its name in the PTX, its argument struct and its Rust function.
//!
//! The CUDA device looks kernels up by the name, the emulator calls the function; both come from
//! the same row, so they cannot drift apart.

use bytemuck::Pod;

/// One kernel, as a type.
pub trait KernelFn: 'static {
    /// The one by-value argument.
    type Args: Pod + Send + Sync;
    /// Row of the table.
    const ID: KernelId;
    /// One thread of it, as the emulator runs it.
    ///
    /// # Safety
    /// Only inside an emulator launch; the arguments' views must be live registered memory.
    unsafe fn call(args: Self::Args);
}

macro_rules! kernels {
    ($($(#[$doc:meta])+ $kernel:ident = $module:ident::$name:ident($args:ident);)*) => {
        /// Row of the kernel table.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(usize)]
        pub enum KernelId {
            $($(#[$doc])+ $kernel,)*
        }

        impl KernelId {
            /// All rows, in order.
            pub const ALL: &[KernelId] = &[$(KernelId::$kernel,)*];

            /// The kernel's name in the PTX and its launch bounds.
            pub const fn info(self) -> cuda_std::KernelInfo {
                match self {
                    $(KernelId::$kernel => gpu::$module::$name::INFO,)*
                }
            }

            /// The kernel's name in the PTX.
            pub const fn name(self) -> &'static str {
                self.info().name
            }
        }

        $(
            $(#[$doc])+
            pub struct $kernel;

            impl KernelFn for $kernel {
                type Args = $args;
                const ID: KernelId = KernelId::$kernel;
                unsafe fn call(args: Self::Args) {
                    // SAFETY: passed on to the caller.
                    unsafe { gpu::$module::$name(args) }
                }
            }
        )*
    };
}

use gpu::abi::ExpertArgs;
use gpu::absorb::AbsorbArgs;
use gpu::act::ActArgs;
use gpu::add::AddArgs;
use gpu::attention::AttentionArgs;
use gpu::combine::CombineArgs;
use gpu::embed::EmbedArgs;
use gpu::group::GroupArgs;
use gpu::index::IndexArgs;
use gpu::index_select::SelectArgs;
use gpu::linear::LinearArgs;
use gpu::narrow::NarrowArgs;
use gpu::norm::NormArgs;
use gpu::quantise::QuantiseArgs;
use gpu::replay::ReplayArgs;
use gpu::rope::RopeArgs;
use gpu::route::RouteArgs;
use gpu::silu::SiluMulArgs;

kernels! {
    /// Rows of the embedding table.
    Embed = embed::embed(EmbedArgs);
    /// The same of signed bytes.
    EmbedInt8 = embed::embed_int8(EmbedArgs);
    /// The same of f32.
    EmbedF32 = embed::embed_f32(EmbedArgs);
    /// RMS normalisation.
    RmsNorm = norm::rms_norm(NormArgs);
    /// Layer normalisation.
    LayerNorm = norm::layer_norm(NormArgs);
    /// Dense rows, one row and one token a warp.
    LinearThin = linear::linear_thin(LinearArgs);
    /// Dense rows, two rows and one token a warp.
    LinearTwo = linear::linear_two(LinearArgs);
    /// Dense rows, four rows and one token a warp.
    LinearFour = linear::linear_four(LinearArgs);
    /// Dense rows, two rows and two tokens a warp.
    LinearPair = linear::linear_pair(LinearArgs);
    /// Dense rows, two rows and four tokens a warp.
    LinearQuad = linear::linear_quad(LinearArgs);
    /// Dense rows, four rows and four tokens a warp.
    LinearMany = linear::linear_many(LinearArgs);
    /// Dense rows of signed bytes, one row and one token a warp.
    LinearInt8Thin = linear_int8::linear_int8_thin(LinearArgs);
    /// The same, two rows and one token a warp.
    LinearInt8Two = linear_int8::linear_int8_two(LinearArgs);
    /// The same, four rows and one token a warp.
    LinearInt8Four = linear_int8::linear_int8_four(LinearArgs);
    /// The same, two rows and two tokens a warp.
    LinearInt8Pair = linear_int8::linear_int8_pair(LinearArgs);
    /// The same, two rows and four tokens a warp.
    LinearInt8Quad = linear_int8::linear_int8_quad(LinearArgs);
    /// The same, four rows and four tokens a warp.
    LinearInt8Many = linear_int8::linear_int8_many(LinearArgs);
    /// Dense rows of f32, one row and one token a warp.
    LinearF32Thin = linear_f32::linear_f32_thin(LinearArgs);
    /// The same, two rows and one token a warp.
    LinearF32Two = linear_f32::linear_f32_two(LinearArgs);
    /// The same, four rows and one token a warp.
    LinearF32Four = linear_f32::linear_f32_four(LinearArgs);
    /// The same, two rows and two tokens a warp.
    LinearF32Pair = linear_f32::linear_f32_pair(LinearArgs);
    /// The same, two rows and four tokens a warp.
    LinearF32Quad = linear_f32::linear_f32_quad(LinearArgs);
    /// The same, four rows and four tokens a warp.
    LinearF32Many = linear_f32::linear_f32_many(LinearArgs);
    /// Dense rows, 64 of them and 32 tokens a block.
    LinearTile = linear_tile::linear_tile(LinearArgs);
    /// The same of signed bytes.
    LinearInt8Tile = linear_tile::linear_int8_tile(LinearArgs);
    /// Gated activation.
    SiluMul = silu::silu_mul(SiluMulArgs);
    /// Rows rounded to bf16.
    Narrow = narrow::narrow(NarrowArgs);
    /// Interleaved rotary embedding.
    Rope = rope::rope(RopeArgs);
    /// Queries into the latent space.
    AbsorbQuery = absorb::absorb_query(AbsorbArgs);
    /// The same with weights of signed bytes.
    AbsorbQueryInt8 = absorb::absorb_query_int8(AbsorbArgs);
    /// The same with weights of f32.
    AbsorbQueryF32 = absorb::absorb_query_f32(AbsorbArgs);
    /// Attention to one chunk of positions.
    AttentionChunk = attention::attention_chunk(AttentionArgs);
    /// The same over cache rows of bf16.
    AttentionChunkBf16 = attention::attention_chunk_bf16(AttentionArgs);
    /// The same in blocks of many heads.
    AttentionChunkMany = attention_many::attention_chunk_many(AttentionArgs);
    /// That over cache rows of bf16.
    AttentionChunkManyBf16 = attention_many::attention_chunk_many_bf16(AttentionArgs);
    /// The same with eight heads at a time.
    AttentionChunkEight = attention_many::attention_chunk_eight(AttentionArgs);
    /// That over cache rows of bf16.
    AttentionChunkEightBf16 = attention_many::attention_chunk_eight_bf16(AttentionArgs);
    /// Merge of attention's chunks.
    AttentionMerge = attention_merge::attention_merge(AttentionArgs);
    /// The indexer's scores.
    IndexScores = index::index_scores(IndexArgs);
    /// The same for heads of 128 columns.
    IndexScores128 = index_128::index_scores_128(IndexArgs);
    /// The indexer's choice.
    IndexSelect = index_select::index_select(SelectArgs);
    /// The best of each tile of positions.
    IndexSelectTiles = index_select::index_select_tiles(SelectArgs);
    /// The best of those.
    IndexSelectMerge = index_select::index_select_merge(SelectArgs);
    /// The router.
    Route = route::route(RouteArgs);
    /// A trace in the router's place.
    Replay = replay::replay(ReplayArgs);
    /// Assignments sorted by expert.
    GroupExperts = group::group_experts(GroupArgs);
    /// Activations to fixed point.
    QuantiseRows = quantise::quantise_rows(QuantiseArgs);
    /// Gate and up to the input of down.
    ActQuantise = act::act_quantise(ActArgs);
    /// Raw matrices of experts with one token.
    MatmulRaw = matmul_raw::matmul_raw(ExpertArgs);
    /// The same where folds have fewer than 1,024 columns.
    MatmulRawNarrow = matmul_raw_narrow::matmul_raw_narrow(ExpertArgs);
    /// Raw matrices with row scales of experts with several tokens, on tensor cores.
    MatmulRawMma = matmul_raw_mma::matmul_raw_mma(ExpertArgs);
    /// The same with grouped scales.
    MatmulRawMmaGrouped = matmul_raw_mma_grouped::matmul_raw_mma_grouped(ExpertArgs);
    /// Matrices coded in pairs, of experts with one token: decoded to registers.
    MatmulRansPair = matmul_rans::matmul_rans_pair(ExpertArgs);
    /// Matrices coded in triples, likewise.
    MatmulRansTriple = matmul_rans::matmul_rans_triple(ExpertArgs);
    /// Matrices coded in pairs, of experts with 2 to 8 tokens: decoded to registers.
    MatmulRansTokensPair = matmul_rans_tokens::matmul_rans_tokens_pair(ExpertArgs);
    /// Matrices coded in triples, likewise.
    MatmulRansTokensTriple = matmul_rans_tokens::matmul_rans_tokens_triple(ExpertArgs);
    /// Matrices coded in pairs with row scales, of experts with 2 to 8 tokens, on tensor cores.
    MatmulRansMmaPair = matmul_rans_mma::matmul_rans_mma_pair(ExpertArgs);
    /// Matrices coded in triples, likewise.
    MatmulRansMmaTriple = matmul_rans_mma::matmul_rans_mma_triple(ExpertArgs);
    /// Matrices coded in pairs to packed rows.
    DecodeRansPair = decode_rans::decode_rans_pair(ExpertArgs);
    /// Matrices coded in triples, likewise.
    DecodeRansTriple = decode_rans::decode_rans_triple(ExpertArgs);
    /// Matrices in plane3 of experts with one token, segments of 1,024 columns.
    MatmulPlane3 = matmul_plane3::matmul_plane3(ExpertArgs);
    /// The same, segments of 512 columns.
    MatmulPlane3Half = matmul_plane3::matmul_plane3_half(ExpertArgs);
    /// The same, shorter segments.
    MatmulPlane3Narrow = matmul_plane3::matmul_plane3_narrow(ExpertArgs);
    /// Matrices in plane3 to packed rows.
    DecodePlane3 = decode_plane3::decode_plane3(ExpertArgs);
    /// The experts' weighted sum.
    Combine = combine::combine(CombineArgs);
    /// Residual addition.
    Add = add::add(AddArgs);
}
