//! The `#[kernel]` attribute of cuda_std.

use proc_macro::TokenStream;
use quote::quote;
use syn::parse::{Parse, ParseStream};
use syn::punctuated::Punctuated;
use syn::{FnArg, Ident, ItemFn, LitInt, ReturnType, Token, parse_macro_input};

/// What is given as `#[kernel(threads = 256, min_blocks = 3, prologue)]`.
#[derive(Default)]
struct Bounds {
    threads: u32,
    min_blocks: u32,
    prologue: bool,
}

impl Parse for Bounds {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        struct Entry(Ident, Option<LitInt>);
        impl Parse for Entry {
            fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
                let name: Ident = input.parse()?;
                if name == "prologue" {
                    return Ok(Self(name, None));
                }
                input.parse::<Token![=]>()?;
                Ok(Self(name, Some(input.parse()?)))
            }
        }
        let mut bounds = Self::default();
        for Entry(name, value) in Punctuated::<Entry, Token![,]>::parse_terminated(input)? {
            let Some(value) = value else {
                bounds.prologue = true;
                continue;
            };
            let number: u32 = value.base10_parse()?;
            match name.to_string().as_str() {
                "threads" if (32..=1024).contains(&number) && number.is_multiple_of(32) => {
                    bounds.threads = number;
                }
                "threads" => {
                    return Err(syn::Error::new(
                        value.span(),
                        "threads must be a multiple of 32 from 32 to 1024",
                    ));
                }
                "min_blocks" if (1..=32).contains(&number) => bounds.min_blocks = number,
                "min_blocks" => {
                    return Err(syn::Error::new(value.span(), "min_blocks must be 1 to 32"));
                }
                _ => {
                    return Err(syn::Error::new(
                        name.span(),
                        "expected `threads`, `min_blocks` or `prologue`",
                    ));
                }
            }
        }
        if bounds.min_blocks > 0 && bounds.threads == 0 {
            return Err(input.error("min_blocks needs threads"));
        }
        Ok(bounds)
    }
}

/// Marks a function as a kernel.
///
/// `#[kernel] pub unsafe fn name(args: Args)` becomes a PTX entry of that name on nvptx64, where
/// `args` (one `#[repr(C)]` [`bytemuck::Pod`] struct) is passed by value, and stays a plain function
/// elsewhere, which the emulator calls once per CUDA thread. A module of the kernel's name holds
/// `INFO: cuda_std::KernelInfo` (entry name and launch bounds).
///
/// `threads` and `min_blocks` become `.maxntid` and `.minnctapersm` in the PTX (through
/// `cuda_builder`): the block size launched must not exceed `threads`.
///
/// A kernel may start while the one before it on its stream still runs: before its body it waits for
/// that one's results (`cuda_std::grid::wait`) and then lets the next one start. With `prologue` it lets
/// the next one start at once, and the body itself calls `cuda_std::grid::wait`, in every thread: after
/// what it can do from memory that no kernel in flight writes, before anything else.
///
/// [`bytemuck::Pod`]: https://docs.rs/bytemuck/latest/bytemuck/trait.Pod.html
#[proc_macro_attribute]
pub fn kernel(attribute: TokenStream, item: TokenStream) -> TokenStream {
    let bounds = parse_macro_input!(attribute as Bounds);
    let function = parse_macro_input!(item as ItemFn);
    expand(&bounds, &function)
        .unwrap_or_else(syn::Error::into_compile_error)
        .into()
}

fn expand(bounds: &Bounds, function: &ItemFn) -> syn::Result<proc_macro2::TokenStream> {
    let signature = &function.sig;
    let refuse = |what: &str| Err(syn::Error::new_spanned(signature, what));
    if signature.unsafety.is_none() {
        return refuse(
            "a kernel is an `unsafe fn`: what it reads and writes is its caller's promise",
        );
    }
    if !signature.generics.params.is_empty() || signature.asyncness.is_some() {
        return refuse("a kernel is neither generic nor async");
    }
    if !matches!(signature.output, ReturnType::Default) {
        return refuse("a kernel returns nothing");
    }
    let (Some(FnArg::Typed(argument)), 1) = (signature.inputs.first(), signature.inputs.len())
    else {
        return refuse("a kernel takes exactly one argument: a `#[repr(C)]` Pod struct by value");
    };
    let (attributes, visibility, body) = (&function.attrs, &function.vis, &function.block.stmts);
    let (name, kind) = (&signature.ident, &argument.ty);
    let name_text = name.to_string();
    let about = format!("Entry name and launch bounds of the kernel `{name_text}`.");
    let (threads, min_blocks) = (bounds.threads, bounds.min_blocks);
    let wait = if bounds.prologue {
        quote! {}
    } else {
        quote! { ::cuda_std::grid::wait(); }
    };
    Ok(quote! {
        #[cfg(target_arch = "nvptx64")]
        #(#attributes)*
        #[unsafe(no_mangle)]
        #visibility unsafe extern "ptx-kernel" fn #name(#argument) {
            ::cuda_std::launch_bounds::<#threads, #min_blocks>();
            #wait
            ::cuda_std::grid::launch_dependents();
            #(#body)*
        }

        #[cfg(not(target_arch = "nvptx64"))]
        #(#attributes)*
        #visibility unsafe fn #name(#argument) {
            #(#body)*
        }

        #[doc = #about]
        #visibility mod #name {
            /// Entry name and launch bounds.
            pub const INFO: ::cuda_std::KernelInfo = ::cuda_std::KernelInfo {
                name: #name_text,
                threads: #threads,
                min_blocks: #min_blocks,
            };
        }

        const _: () = ::cuda_std::assert_kernel_argument::<#kind>();
    })
}
