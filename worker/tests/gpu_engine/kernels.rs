//! What a profiled run tells of its kernels. The reference libraries count operations instead of time, so figures are not compared.

use crate::pods::Job;
use crate::support::{Change, amp, bert, gpt, mlp, on, resnet, run};
use switchyard_cuda_libraries::environment;
use switchyard_worker_contract::config::*;
use switchyard_worker_contract::kernels::{KernelTimes, Launches};
use switchyard_worker_contract::prediction::{Arithmetic, Part};

const STEPS: u64 = 6;
const PROFILE: Profile = Profile { from_step: 3, steps: 2 };

/// The times of rank 0, and works of a step.
fn profiled(ranks: u32, change: impl Fn(&mut EngineConfig)) -> (KernelTimes, u64) {
    let libraries = environment();
    let job = Job::new(1, ranks, STEPS).with(on(Device::Cuda, STEPS, |config| {
        change(config);
        config.profile = Some(PROFILE);
    }));
    let told = run(&job, &libraries, &[("SWITCHYARD_REFERENCE_DEVICES", "2"), ("SWITCHYARD_REFERENCE_SEED", "3")]);
    assert!(told.codes.iter().all(|code| *code == 0), "{}", told.log);
    let unprofiled = job.with(|config| config.profile = None);
    let expected =
        run(&unprofiled, &libraries, &[("SWITCHYARD_REFERENCE_DEVICES", "2"), ("SWITCHYARD_REFERENCE_SEED", "3")]);
    assert_eq!(told.digest, expected.digest, "a profile changes no bit");
    let text = unprofiled.read("run-0/record/rank-0.kernels.json");
    (serde_json::from_str(&text).unwrap(), told.calls.unwrap().works)
}

fn launches(times: &KernelTimes, is: impl Fn(&Launches) -> bool) -> u64 {
    times.kernels.iter().filter(|kernel| is(kernel)).map(|kernel| kernel.launches).sum()
}

#[test]
fn every_work_of_the_profiled_steps_is_timed() {
    let models: [(&str, Change); 4] = [("mlp", mlp), ("resnet", resnet), ("gpt", gpt), ("bert", bert)];
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
        // Of a ResNet-18 there are 20; nobody needs the gradient of its pixels.
        let expected = if name == "resnet" { [20, 19, 20] } else { [0; 3] };
        assert_eq!(all, expected.map(|count| count * steps * u64::from(merge)), "{name}");
        for part in [Part::Forward, Part::Backward, Part::Update] {
            assert!(launches(&times, |kernel| kernel.part == part) > 0, "{name}: {part:?}");
        }
        // All works of a micro-batch lie behind each other, and the update behind the last.
        assert_eq!(times.gaps.count, steps * (works - u64::from(merge)), "{name}");
        assert!(times.gaps.longest_seconds <= times.gaps.seconds, "{name}: {:?}", times.gaps);
        assert_eq!(times.copies.count, steps * u64::from(merge), "{name}");
        assert!(times.copies.bytes > 0 && times.copies.seconds > 0.0, "{name}: {:?}", times.copies);
    }
}

#[test]
fn products_tell_what_they_are_computed_with() {
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
    // Widths of 16 and 256, but for the gradient of the head in 32 bits.
    assert!(products(&half, |product| product.aligned).0);
    // 13 numbers are no multiple of 16 bytes.
    assert!(!products(&odd, |product| product.aligned).1);
    assert_eq!(launches(&half, |kernel| kernel.part == Part::Update && kernel.half), 0);
}

#[test]
fn ranks_that_reduce_between_backward_and_update_have_no_gap_there() {
    let (times, works) = profiled(2, mlp);
    assert_eq!(launches(&times, |_| true), u64::from(PROFILE.steps) * works);
    assert_eq!(times.gaps.count, u64::from(PROFILE.steps) * (works - 2));
}
