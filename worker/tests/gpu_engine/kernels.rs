//! Kernel times of a profiled run. The reference libraries count operations instead of time, so the
//! figures are not compared.

use crate::pods::Job;
use crate::support::{Change, amp, bert, gpt, mlp, on, resnet, run};
use switchyard_cuda_libraries::environment;
use switchyard_worker_contract::config::*;
use switchyard_worker_contract::kernels::{KernelTimes, Launches};
use switchyard_worker_contract::prediction::{Arithmetic, Part};

const STEPS: u64 = 6;
const PROFILE: Profile = Profile { from_step: 3, steps: 2 };

/// Kernel times of rank 0, and operations per step.
fn profiled(ranks: u32, change: impl Fn(&mut EngineConfig)) -> (KernelTimes, u64) {
    let libraries = environment();
    let job = Job::new(1, ranks, STEPS).with(on(Device::Cuda, STEPS, |config| {
        change(config);
        config.profile = Some(PROFILE);
    }));
    let output = run(&job, &libraries, &[("SWITCHYARD_REFERENCE_DEVICES", "2"), ("SWITCHYARD_REFERENCE_SEED", "3")]);
    assert!(output.codes.iter().all(|code| *code == 0), "{}", output.log);
    let unprofiled = job.with(|config| config.profile = None);
    let expected =
        run(&unprofiled, &libraries, &[("SWITCHYARD_REFERENCE_DEVICES", "2"), ("SWITCHYARD_REFERENCE_SEED", "3")]);
    assert_eq!(output.digest, expected.digest, "profiling changes no bit");
    let text = unprofiled.read("run-0/record/rank-0.kernels.json");
    (serde_json::from_str(&text).unwrap(), output.calls.unwrap().works)
}

fn launches(times: &KernelTimes, is: impl Fn(&Launches) -> bool) -> u64 {
    times.kernels.iter().filter(|kernel| is(kernel)).map(|kernel| kernel.launches).sum()
}

#[test]
fn every_operation_of_the_profiled_steps_is_timed() {
    // The cheapest model merges the most batches.
    let models: [(&str, Change); 4] = [("bert", bert), ("gpt", gpt), ("resnet", resnet), ("mlp", mlp)];
    for (merge, (name, model)) in (1..).zip(models) {
        let (times, works) = profiled(1, |config| {
            model(config);
            config.batch_merge = merge;
        });
        let steps = u64::from(PROFILE.steps);
        assert_eq!((times.attempt, times.steps, times.tf32), (1, steps, false), "{name}");
        assert_eq!(launches(&times, |_| true), steps * works, "{name}");
        assert!(
            times.kernels.iter().all(|kernel| kernel.seconds > 0.0 && kernel.cost.bytes > 0.0),
            "{name}: {times:?}"
        );
        let convolutions = |name: &str| launches(&times, |kernel| kernel.name == name && kernel.cost.flops > 0.0);
        let all = ["convolution", "convolution_images", "convolution_filters"].map(convolutions);
        // A ResNet-18 has 20 convolutions; the gradient of its pixels is not needed.
        let expected = if name == "resnet" { [20, 19, 20] } else { [0; 3] };
        assert_eq!(all, expected.map(|count| count * steps * u64::from(merge)), "{name}");
        for part in [Part::Forward, Part::Backward, Part::Update] {
            assert!(launches(&times, |kernel| kernel.part == part) > 0, "{name}: {part:?}");
        }
        // The operations of a micro-batch follow one another, and the update follows the last one.
        assert_eq!(times.gaps.count, steps * (works - u64::from(merge)), "{name}");
        assert!(times.gaps.longest_seconds <= times.gaps.seconds, "{name}: {:?}", times.gaps);
        assert_eq!(times.copies.count, steps * u64::from(merge), "{name}");
        assert!(times.copies.bytes > 0 && times.copies.seconds > 0.0, "{name}: {:?}", times.copies);
    }
}

#[test]
fn products_report_their_arithmetic() {
    let bf16 = amp(HalfType::Bf16, LossScaling::Static { scale: 1.0 });
    let (whole, _) = profiled(1, |config| {
        gpt(config);
        config.gpu.matmul = Matmul::Tf32;
    });
    let (half, _) = profiled(1, |config| {
        gpt(config);
        config.precision = bf16;
    });
    let (odd, _) = profiled(1, |config| {
        mlp(config);
        config.precision = bf16;
    });
    let products = |times: &KernelTimes, is: fn(&Launches) -> bool| {
        let products = times.kernels.iter().filter(|kernel| kernel.name == "product");
        let found: Vec<bool> = products.map(is).collect();
        assert!(!found.is_empty());
        (found.iter().any(|is| *is), found.iter().all(|is| *is))
    };
    assert!(whole.tf32 && !half.tf32);
    assert_eq!(products(&whole, |product| product.cost.arithmetic == Arithmetic::F32), (true, true));
    assert_eq!(products(&half, |product| product.cost.arithmetic == Arithmetic::Bf16 && product.half), (true, true));
    // Widths are 16 and 256; the head's gradient is f32.
    assert!(products(&half, |product| product.aligned).0);
    // 13 elements are not a multiple of 16 bytes.
    assert!(!products(&odd, |product| product.aligned).1);
    assert_eq!(launches(&half, |kernel| kernel.part == Part::Update && kernel.half), 0);
}

#[test]
fn ranks_that_reduce_between_backward_and_update_have_no_gap_there() {
    let (times, works) = profiled(2, mlp);
    assert_eq!(launches(&times, |_| true), u64::from(PROFILE.steps) * works);
    assert_eq!(times.gaps.count, u64::from(PROFILE.steps) * (works - 2));
}
