//! Chooses the kernel for bf16 matrix products: one for the whole group, because kernels differ in
//! summation order.
//!
//! ```text
//! every rank: its kernels, best first ─> the checkpoint's kernel, if all ranks allow it,
//!                                        else rank 0's best kernel that all ranks allow
//! ```

use super::CpuPlan;
use crate::comm::Group;
use crate::cpu::{Cpu, HalfKernel};
use crate::train::TrainError;
use crate::train::training::Training;
use switchyard_worker_contract::env;

/// Returns the plan with the group's kernel. `saved`: kernel of the checkpoint from which the run
/// resumes.
///
/// # Errors
/// No kernel is allowed on all ranks, or the group failed.
pub(super) fn agree(
    training: &Training,
    plan: CpuPlan,
    group: &mut Group,
    saved: Option<HalfKernel>,
) -> Result<CpuPlan, TrainError> {
    if plan.half_kernel(training).is_none() {
        return Ok(plan);
    }
    let own = serde_json::to_vec(&plan.half_kernels).unwrap_or_default();
    let offers: Result<Vec<Vec<HalfKernel>>, _> =
        group.all_gather("the kernels for bf16", &own)?.iter().map(|bytes| serde_json::from_slice(bytes)).collect();
    let offers = offers.map_err(|error| TrainError::Usage(format!("kernels for bf16: {error}")))?;
    let Choice { kernel, notes } = choose(&offers, saved).map_err(TrainError::Usage)?;
    if group.rank() == 0 {
        notes.iter().for_each(|note| eprintln!("note: {note}"));
    }
    plan.with_half_kernel(training, kernel)
}

/// Name of the kernels in use. `half`: the kernel for bf16 products, if there are any.
pub(super) fn name(cpu: &Cpu, half: Option<HalfKernel>) -> String {
    match half {
        Some(half) if half != HalfKernel::F32 => format!("{}+{}", cpu.isa.name(), half.name()),
        _ => cpu.isa.name().to_owned(),
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Choice {
    kernel: HalfKernel,
    /// Notes for the log.
    notes: Vec<String>,
}

/// Chooses from the kernels allowed on each rank, best first.
fn choose(offers: &[Vec<HalfKernel>], saved: Option<HalfKernel>) -> Result<Choice, String> {
    let own = offers.first().map_or(&[][..], Vec::as_slice);
    let mut common = own.iter().copied().filter(|kernel| offers.iter().all(|offer| offer.contains(kernel)));
    let Some(best) = common.clone().next() else {
        let differs = |offer: &&Vec<HalfKernel>| !own.iter().any(|kernel| offer.contains(kernel));
        let rank = offers.iter().position(|offer| differs(&offer)).unwrap_or(0);
        let name = env::KERNEL;
        let (got, expected) = (names(&offers[rank]), names(own));
        return Err(format!("{name}: rank {rank} allows {got} for bf16; expected {expected}, as rank 0 has"));
    };
    let kernel = saved.filter(|saved| common.any(|kernel| kernel == *saved)).unwrap_or(best);
    let mut notes = Vec::new();
    if let Some(saved) = saved.filter(|saved| *saved != kernel) {
        notes.push(format!(
            "products of bf16 are computed by {}; up to the checkpoint it was {}, which adds in another order: the last bits differ",
            kernel.name(),
            saved.name()
        ));
    } else if saved.is_none()
        && let Some(first) = own.first().filter(|first| **first != kernel)
    {
        let (first, kernel) = (first.name(), kernel.name());
        notes.push(format!("products of bf16 are computed by {kernel}: not every rank may use {first}"));
    }
    Ok(Choice { kernel, notes })
}

fn names(kernels: &[HalfKernel]) -> String {
    kernels.iter().map(|kernel| kernel.name()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use HalfKernel::{Amx, Dpbf16, F32};

    fn chosen(offers: &[&[HalfKernel]], saved: Option<HalfKernel>) -> (HalfKernel, String) {
        let offers: Vec<Vec<HalfKernel>> = offers.iter().map(|offer| offer.to_vec()).collect();
        let Choice { kernel, notes } = choose(&offers, saved).unwrap();
        (kernel, notes.join("; "))
    }

    #[test]
    fn rank_zero_chooses_among_kernels_allowed_on_all_ranks() {
        let all = [Amx, Dpbf16, F32];
        assert_eq!(chosen(&[&all, &all], None), (Amx, String::new()));
        assert_eq!(
            chosen(&[&all, &[F32, Amx]], None),
            (Amx, String::new()),
            "the order of other ranks does not matter"
        );
        let (kernel, note) = chosen(&[&all, &all, &[Dpbf16, F32]], None);
        assert!(kernel == Dpbf16 && note.contains("not every rank may use amx"), "{kernel:?} {note}");
        assert_eq!(chosen(&[&[F32], &all], None), (F32, String::new()), "rank 0 allows only f32");
        let refused = choose(&[vec![F32], vec![F32], vec![Amx]], None).unwrap_err();
        assert_eq!(refused, "SWITCHYARD_KERNEL: rank 2 allows amx for bf16; expected f32, as rank 0 has");
    }

    #[test]
    fn a_resumed_run_keeps_its_kernel_or_logs_a_note() {
        let all = [Amx, Dpbf16, F32];
        assert_eq!(chosen(&[&all, &all], Some(Dpbf16)), (Dpbf16, String::new()));
        let (kernel, note) = chosen(&[&[Dpbf16, F32], &all], Some(Amx));
        assert!(kernel == Dpbf16 && note.contains("up to the checkpoint it was amx"), "{kernel:?} {note}");
        // Not allowed on all ranks, so no rank uses it.
        assert_eq!(chosen(&[&all, &[Dpbf16, F32]], Some(Amx)).0, Dpbf16);
    }
}
