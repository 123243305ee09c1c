//! cuBLASLt algorithms: selected once per kind of matrix product, and cached between runs.

use super::WORKSPACE;
use super::cache::Cache;
use super::machine::cache_name;
use std::collections::BTreeMap;
use switchyard_cuda::cublaslt::{Algorithm, Arithmetic, CublasLt, Planned, Product};
use switchyard_cuda::driver::Context;
use switchyard_cuda::{Error, Library};
use switchyard_worker_contract::config::Matmul;

/// How f32 values are multiplied.
pub(super) fn arithmetic(matmul: Matmul) -> Arithmetic {
    match matmul {
        Matmul::Ieee | Matmul::Fp8 => Arithmetic::Ieee,
        Matmul::Tf32 => Arithmetic::Tf32,
    }
}

pub(super) struct Algorithms {
    cublaslt: CublasLt,
    /// Everything else that the algorithms depend on.
    key: String,
    known: BTreeMap<String, Algorithm>,
    /// Kinds for which the library was queried.
    queried: usize,
}

impl Algorithms {
    /// Starts cuBLASLt on a device, with the cached algorithms.
    ///
    /// # Errors
    /// cuBLASLt does not start.
    pub fn start(context: &Context, library: &Library, cache: &Cache) -> Result<Algorithms, Error> {
        context.make_current()?;
        let (cublaslt, device) = (CublasLt::start(library)?, cache_name(context.device()));
        let key = format!("{device}, cuBLASLt {}, {WORKSPACE} bytes: algorithms", cublaslt.version());
        let kept = cache.get(&key).and_then(|bytes| serde_json::from_slice::<BTreeMap<String, [u64; 8]>>(&bytes).ok());
        let known = kept.into_iter().flatten().map(|(kind, words)| (kind, Algorithm(words))).collect();
        Ok(Algorithms { cublaslt, key, known, queried: 0 })
    }

    /// # Errors
    /// No algorithm multiplies matrices of this shape.
    pub fn plan(&mut self, product: Product) -> Result<Planned, Error> {
        let kind = product.kind();
        // The library may reject a cached algorithm; then it chooses again.
        let known = self.known.get(&kind).and_then(|algorithm| self.cublaslt.plan_by(product, *algorithm).ok());
        if let Some(planned) = known {
            return Ok(planned);
        }
        let planned = self.cublaslt.plan(product, WORKSPACE, 1)?;
        self.known.insert(kind, planned.algorithm(0));
        self.queried += 1;
        Ok(planned)
    }

    /// Kinds of products for which the library was queried in this run.
    pub fn queried(&self) -> usize {
        self.queried
    }

    /// Caches new algorithms. If two processes write at the same time, one loses its results and
    /// queries again in its next run.
    pub fn save(&self, cache: &Cache) {
        if self.queried > 0 {
            let all: BTreeMap<&String, [u64; 8]> =
                self.known.iter().map(|(kind, algorithm)| (kind, algorithm.0)).collect();
            cache.put(&self.key, &serde_json::to_vec(&all).unwrap_or_default());
        }
    }
}
