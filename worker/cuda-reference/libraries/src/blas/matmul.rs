//! The heuristic and the matrix products.

use super::descriptors::{EpilogueAttributes, Operation, Preference, get};
use super::{CallResult, EXECUTION_FAILED, INVALID_VALUE, NOT_SUPPORTED, done, refused};
use crate::abi::{self, Pointer};
use crate::fault;
use crate::gpu::Gpu;
use crate::gpu::product::{Epilogue, Function, Layout, Product};
use crate::gpu::work::Work;
use crate::numbers::Format;
use std::hash::{DefaultHasher, Hash, Hasher};
use switchyard_cuda_reference::fp8::E5M2;

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Debug)]
pub struct Heuristic {
    algorithm: [u64; 8],
    workspace_bytes: usize,
    state: i32,
    waves: f32,
    reserved: [i32; 4],
}

/// `cublasLtEpilogue_t`.
const BIAS: i32 = 4;
const RELU_BIAS: i32 = 6;
const GELU_AUX_BIAS: i32 = 164;

const MAGIC: u64 = 0x7377_6974_6368_7972;
/// Workspace of the algorithm that needs one.
const WORKSPACE_BYTES: u64 = 65_536;
const WORKSPACE_ALIGNMENT: u64 = 256;

/// A matrix product as defined by its descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct MatmulDescription {
    operation: Operation,
    a: Layout,
    b: Layout,
    c: Layout,
    d: Layout,
}

impl MatmulDescription {
    /// # Safety
    /// The handles must be null or have been created here.
    unsafe fn new(call: &str, operation: Pointer, [a, b, c, d]: [Pointer; 4]) -> CallResult<MatmulDescription> {
        // SAFETY: upheld by the caller.
        let (operation, a, b, c, d) = unsafe {
            let operation = *get::<Operation>(call, operation)?;
            let layout = |raw| get::<Layout>(call, raw).map(|layout| *layout);
            (operation, layout(a)?, layout(b)?, layout(c)?, layout(d)?)
        };
        let described = MatmulDescription { operation, a, b, c, d };
        described.check(call).map(|()| described)
    }

    fn check(&self, call: &str) -> CallResult<()> {
        let MatmulDescription { operation, a, b, c, d } = self;
        let sides =
            |layout: &Layout, flip| if flip { (layout.columns, layout.rows) } else { (layout.rows, layout.columns) };
        let ((m, k), (inner, n)) = (sides(a, operation.transposed[0]), sides(b, operation.transposed[1]));
        if k != inner || (d.rows, d.columns) != (m, n) || (c.rows, c.columns) != (m, n) {
            return refused(call, INVALID_VALUE, &format!("sides that do not fit: {self:?}"));
        }
        self.check_epilogue(call)?;
        if c.format != d.format {
            return refused(call, NOT_SUPPORTED, &format!("formats of C and D: {self:?}"));
        }
        if let (Format::Fp8(_), Format::Fp8(_)) = (a.format, b.format) {
            return self.check_fp8(call);
        }
        if operation.has_fast_sums || operation.scales != [0; 2] {
            return refused(call, NOT_SUPPORTED, &format!("scales or fast sums without 8 bits: {self:?}"));
        }
        let is_fp8 = matches!(a.format, Format::Fp8(_));
        let formats = !is_fp8 && a.format == b.format && (c.format == a.format || c.format == Format::F32);
        if !formats || (operation.is_tf32 && a.format != Format::F32) {
            return refused(call, NOT_SUPPORTED, &format!("formats: {self:?}"));
        }
        Ok(())
    }

    /// A bias, optionally with ReLU, or with GELU whose argument is stored with a column stride
    /// that is a multiple of 8.
    fn check_epilogue(&self, call: &str) -> CallResult<()> {
        let EpilogueAttributes { kind, bias, kept, kept_pitch } = self.operation.epilogue;
        let pitch = self.d.rows as i64;
        match kind {
            0 | 1 if bias == 0 && kept == 0 => Ok(()),
            BIAS | RELU_BIAS if bias != 0 && kept == 0 => Ok(()),
            GELU_AUX_BIAS if bias != 0 && kept != 0 && kept_pitch >= pitch && kept_pitch % 8 == 0 => Ok(()),
            _ => refused(call, NOT_SUPPORTED, &format!("epilogue: {self:?}")),
        }
    }

    /// The epilogue, with its memory.
    fn epilogue(&self) -> Option<Epilogue> {
        let EpilogueAttributes { kind, bias, kept, kept_pitch } = self.operation.epilogue;
        let function = match kind {
            BIAS => Function::None,
            RELU_BIAS => Function::Relu,
            GELU_AUX_BIAS => Function::Gelu,
            _ => return None,
        };
        let layout = Layout { pitch: kept_pitch as u64, ..self.d };
        let of_bias = Layout { rows: self.d.rows, columns: 1, pitch: self.d.rows, ..self.d };
        Some(Epilogue { bias: (of_bias, bias), function, kept: (kept != 0).then_some((layout, kept)) })
    }

    /// As documented for Hopper: A transposed and B not, sizes and strides multiples of 16, C and D
    /// in bf16 (among others).
    fn check_fp8(&self, call: &str) -> CallResult<()> {
        let MatmulDescription { operation, a, b, c, d } = self;
        let numbers = [a, b, c, d].into_iter().flat_map(|layout| [layout.rows, layout.columns, layout.pitch]);
        let multiples = numbers.into_iter().all(|number| number.is_multiple_of(16));
        let formats = (a.format, b.format) != (Format::Fp8(E5M2), Format::Fp8(E5M2)) && c.format == Format::Bf16;
        if operation.transposed != [true, false] || !multiples || !formats || operation.is_tf32 {
            return refused(call, NOT_SUPPORTED, &format!("8 bits: {self:?}"));
        }
        Ok(())
    }

    /// Equal only for algorithms of the same product.
    fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        // Addresses may change from launch to launch.
        let epilogue = EpilogueAttributes { bias: 0, kept: 0, ..self.operation.epilogue };
        let operation = Operation { scales: [0; 2], epilogue, ..self.operation };
        MatmulDescription { operation, ..*self }.hash(&mut hasher);
        hasher.finish()
    }

    /// Rejects an algorithm of another product.
    fn check_fingerprint(&self, call: &str, algorithm: &[u64; 8]) -> CallResult<()> {
        if algorithm[..2] != [MAGIC, self.fingerprint()] {
            return refused(call, INVALID_VALUE, &format!("an algorithm that was not chosen for {self:?}"));
        }
        Ok(())
    }

    fn algorithm(&self, preference: &Preference, workspace_bytes: u64) -> Heuristic {
        let mut algorithm = [0; 8];
        algorithm[..3].copy_from_slice(&[MAGIC, self.fingerprint(), workspace_bytes]);
        algorithm[3..7].copy_from_slice(&preference.alignments.map(u64::from));
        Heuristic { algorithm, workspace_bytes: workspace_bytes as usize, state: 0, waves: 1.0, reserved: [0; 4] }
    }
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // As many as the header has.
pub unsafe extern "C" fn cublasLtMatmulAlgoGetHeuristic(
    handle: Pointer,
    operation: Pointer,
    a: Pointer,
    b: Pointer,
    c: Pointer,
    d: Pointer,
    preference: Pointer,
    most: i32,
    results: *mut Heuristic,
    count: *mut i32,
) -> i32 {
    const CALL: &str = "cublasLtMatmulAlgoGetHeuristic";
    // SAFETY: per the header's contract.
    let choose = || unsafe {
        get::<()>(CALL, handle)?;
        if most <= 0 {
            return refused(CALL, INVALID_VALUE, &format!("{most} algorithms wanted"));
        }
        let described = MatmulDescription::new(CALL, operation, [a, b, c, d])?;
        if described.epilogue().is_some() && fault::requested().is_ok_and(|faults| faults.cublaslt_bare) {
            count.write(0);
            return Ok(());
        }
        let preference = *get::<Preference>(CALL, preference)?;
        let formats = [&described.a, &described.b, &described.c, &described.d].map(|layout| layout.format);
        if preference.alignments.iter().zip(formats).any(|(bytes, format)| u64::from(*bytes) < format.bytes()) {
            return refused(CALL, NOT_SUPPORTED, &format!("alignments {:?}", preference.alignments));
        }
        let sizes = [WORKSPACE_BYTES, 0].into_iter().filter(|bytes| *bytes <= preference.workspace_bytes);
        let found: Vec<Heuristic> =
            sizes.take(most as usize).map(|bytes| described.algorithm(&preference, bytes)).collect();
        count.write(found.len() as i32);
        found.into_iter().enumerate().for_each(|(index, one)| results.add(index).write(one));
        Ok(())
    };
    done(choose())
}

/// The heuristic's result for an algorithm that it chose for this product.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // As many as the header has.
pub unsafe extern "C" fn cublasLtMatmulAlgoCheck(
    handle: Pointer,
    operation: Pointer,
    a: Pointer,
    b: Pointer,
    c: Pointer,
    d: Pointer,
    algorithm: *const [u64; 8],
    result: *mut Heuristic,
) -> i32 {
    const CALL: &str = "cublasLtMatmulAlgoCheck";
    // SAFETY: per the header's contract.
    let check = || unsafe {
        get::<()>(CALL, handle)?;
        let described = MatmulDescription::new(CALL, operation, [a, b, c, d])?;
        let Some(algorithm) = algorithm.as_ref() else { return refused(CALL, INVALID_VALUE, "no algorithm") };
        described.check_fingerprint(CALL, algorithm)?;
        let workspace_bytes = algorithm[2] as usize;
        result.write(Heuristic { algorithm: *algorithm, workspace_bytes, state: 0, waves: 1.0, reserved: [0; 4] });
        Ok(())
    };
    done(check())
}

/// Addresses of a product.
struct Addresses {
    a: u64,
    b: u64,
    c: u64,
    d: u64,
    workspace: std::ops::Range<u64>,
}

/// Rejects an algorithm of another product, or one chosen for better-aligned addresses.
fn check(call: &str, described: &MatmulDescription, algorithm: &[u64; 8], places: &Addresses) -> CallResult<()> {
    described.check_fingerprint(call, algorithm)?;
    let needed = algorithm[2];
    let given = places.workspace.end - places.workspace.start;
    if given < needed || (needed > 0 && !places.workspace.start.is_multiple_of(WORKSPACE_ALIGNMENT)) {
        let at = places.workspace.start;
        return refused(call, INVALID_VALUE, &format!("a workspace of {given} bytes at {at:#x}, needed are {needed}"));
    }
    let least = if let Format::Fp8(_) = described.a.format { 16 } else { 1 };
    for (address, alignment) in [places.a, places.b, places.c, places.d].into_iter().zip(&algorithm[3..7]) {
        let alignment = (*alignment).max(least);
        if !address.is_multiple_of(alignment) {
            let text = format!("a matrix at {address:#x}, the algorithm was chosen for multiples of {alignment}");
            return refused(call, INVALID_VALUE, &text);
        }
    }
    Ok(())
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // As many as the header has.
pub unsafe extern "C" fn cublasLtMatmul(
    handle: Pointer,
    operation: Pointer,
    alpha: *const f32,
    a: Pointer,
    a_layout: Pointer,
    b: Pointer,
    b_layout: Pointer,
    beta: *const f32,
    c: Pointer,
    c_layout: Pointer,
    d: Pointer,
    d_layout: Pointer,
    algorithm: *const [u64; 8],
    workspace: Pointer,
    workspace_bytes: usize,
    stream: Pointer,
) -> i32 {
    const CALL: &str = "cublasLtMatmul";
    // SAFETY: per the header's contract.
    let run = || unsafe {
        get::<()>(CALL, handle)?;
        let described = MatmulDescription::new(CALL, operation, [a_layout, b_layout, c_layout, d_layout])?;
        let (Some(alpha), Some(beta), Some(algorithm)) = (alpha.as_ref(), beta.as_ref(), algorithm.as_ref()) else {
            return refused(CALL, INVALID_VALUE, "no alpha, beta or algorithm");
        };
        let [a, b, c, d, workspace] = [a, b, c, d, workspace].map(|raw| raw.addr() as u64);
        let places = Addresses { a, b, c, d, workspace: workspace..workspace + workspace_bytes as u64 };
        check(CALL, &described, algorithm, &places)?;
        let queued = abi::with(|gpu| {
            let stream = abi::stream(gpu, stream)?;
            crate::nvtx::queued("a product");
            enqueue(gpu, stream, &described, (*alpha, *beta), places);
            Ok(())
        });
        queued.or_else(|code| refused(CALL, EXECUTION_FAILED, &format!("the driver says {code:?}")))
    };
    done(run())
}

fn enqueue(gpu: &mut Gpu, stream: usize, described: &MatmulDescription, (alpha, beta): (f32, f32), places: Addresses) {
    let MatmulDescription { operation, a, b, c, d } = *described;
    let mut uses = vec![a.whole(places.a), b.whole(places.b), d.whole(places.d)];
    if beta != 0.0 {
        uses.push(c.whole(places.c));
    }
    if !places.workspace.is_empty() {
        uses.push(places.workspace.clone());
    }
    let epilogue = described.epilogue();
    if let Some(Epilogue { bias, kept, .. }) = epilogue {
        uses.extend([Some(bias), kept].into_iter().flatten().map(|(layout, address)| layout.whole(address)));
    }
    let scales = operation.scales.map(|address| (address != 0).then_some(address));
    uses.extend(scales.into_iter().flatten().map(|address| address..address + 4));
    let inner = if operation.transposed[0] { a.rows } else { a.columns };
    let name = format!("a product of {} x {} x {inner}", c.columns, c.rows);
    let product = Product {
        a: (a, places.a),
        b: (b, places.b),
        c: (c, places.c),
        d: (d, places.d),
        transposed: operation.transposed,
        alpha,
        beta,
        is_tf32: operation.is_tf32,
        scales,
        epilogue,
        workspace: places.workspace,
    };
    gpu.enqueue(stream, name, &uses, Work::Product(Box::new(product)));
}
