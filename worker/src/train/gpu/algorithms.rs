//! Algorithms of products: asked for once for each kind, and kept between runs.

use super::WORKSPACE;
use super::cache::Cache;
use super::machine::name_of;
use std::collections::BTreeMap;
use switchyard_cuda::cublaslt::{Algorithm, Arithmetic, CublasLt, Planned, Product};
use switchyard_cuda::driver::Context;
use switchyard_cuda::{Error, Library};
use switchyard_worker_contract::config::Matmul;

/// How 32-bit numbers are multiplied.
pub(super) fn arithmetic(matmul: Matmul) -> Arithmetic {
    match matmul {
        Matmul::Ieee | Matmul::Fp8 => Arithmetic::Ieee,
        Matmul::Tf32 => Arithmetic::Tf32,
    }
}

pub(super) struct Algorithms {
    cublaslt: CublasLt,
    /// What they depend on beside the kind of a product.
    key: String,
    known: BTreeMap<String, Algorithm>,
    /// Kinds of which the library was asked.
    asked: usize,
}

impl Algorithms {
    /// Starts cuBLASLt on a device, with the algorithms that were kept.
    ///
    /// # Errors
    /// It does not start.
    pub fn start(context: &Context, library: &Library, cache: &Cache) -> Result<Algorithms, Error> {
        context.make_current()?;
        let (cublaslt, device) = (CublasLt::start(library)?, name_of(context.device()));
        let key = format!("{device}, cuBLASLt {}, {WORKSPACE} bytes: algorithms", cublaslt.version());
        let kept = cache.get(&key).and_then(|bytes| serde_json::from_slice::<BTreeMap<String, [u64; 8]>>(&bytes).ok());
        let known = kept.into_iter().flatten().map(|(kind, words)| (kind, Algorithm(words))).collect();
        Ok(Algorithms { cublaslt, key, known, asked: 0 })
    }

    /// # Errors
    /// No algorithm multiplies matrices of this shape.
    pub fn plan(&mut self, product: Product) -> Result<Planned, Error> {
        let kind = product.kind();
        // A library may refuse what it has chosen itself: then it chooses again.
        let known = self.known.get(&kind).and_then(|algorithm| self.cublaslt.plan_by(product, *algorithm).ok());
        if let Some(planned) = known {
            return Ok(planned);
        }
        let planned = self.cublaslt.plan(product, WORKSPACE, 1)?;
        self.known.insert(kind, planned.algorithm(0));
        self.asked += 1;
        Ok(planned)
    }

    /// Kinds of products of which the library was asked in this run.
    pub fn asked(&self) -> usize {
        self.asked
    }

    /// Keeps what is new. Of two processes that do so at the same time one loses what it has found, and asks again in its next run.
    pub fn keep(&self, cache: &Cache) {
        if self.asked > 0 {
            let all: BTreeMap<&String, [u64; 8]> =
                self.known.iter().map(|(kind, algorithm)| (kind, algorithm.0)).collect();
            cache.put(&self.key, &serde_json::to_vec(&all).unwrap_or_default());
        }
    }
}
