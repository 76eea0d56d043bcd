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
                type Args = gpu::$module::$args;
                const ID: KernelId = KernelId::$kernel;
                unsafe fn call(args: Self::Args) {
                    // SAFETY: passed on to the caller.
                    unsafe { gpu::$module::$name(args) }
                }
            }
        )*
    };
}

kernels! {
    /// Rows of the embedding table.
    Embed = embed::embed(EmbedArgs);
    /// RMS normalisation.
    RmsNorm = norm::rms_norm(NormArgs);
    /// Layer normalisation.
    LayerNorm = norm::layer_norm(NormArgs);
    /// Dense rows, one row and one token a warp.
    LinearThin = linear::linear_thin(LinearArgs);
    /// Dense rows, four rows and one token a warp.
    LinearOne = linear::linear_one(LinearArgs);
    /// Dense rows, four rows and four tokens a warp.
    LinearMany = linear::linear_many(LinearArgs);
    /// Gated activation.
    SiluMul = silu::silu_mul(SiluMulArgs);
    /// Interleaved rotary embedding.
    Rope = rope::rope(RopeArgs);
    /// Queries into the latent space.
    AbsorbQuery = absorb::absorb_query(AbsorbArgs);
    /// Attention to one chunk of positions.
    AttentionChunk = attention::attention_chunk(AttentionArgs);
    /// Merge of attention's chunks.
    AttentionMerge = attention::attention_merge(AttentionArgs);
    /// The indexer's scores.
    IndexScores = index::index_scores(IndexArgs);
    /// The indexer's choice.
    IndexSelect = index::index_select(IndexArgs);
    /// The router.
    Route = route::route(RouteArgs);
    /// Assignments sorted by expert.
    GroupExperts = group::group_experts(GroupArgs);
    /// Activations to fixed point.
    QuantiseRows = quantise::quantise_rows(QuantiseArgs);
    /// Gate and up to the input of down.
    ActQuantise = act::act_quantise(ActArgs);
    /// The experts' weighted sum.
    Combine = combine::combine(CombineArgs);
    /// Residual addition.
    Add = add::add(AddArgs);
}
