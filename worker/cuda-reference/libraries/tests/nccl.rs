//! All-reduce through the engine's calls. Ranks are threads of a child, each with its own GPU.
//! Misuse is found under every seed, and a failure of one rank reaches the others.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)]

mod child;
mod device;

use child::misuse_test;
use device::{Gpu, number, on_a_device, places};
use std::sync::Barrier;
use std::time::Duration;
use switchyard_cuda::Error;
use switchyard_cuda::driver::{Context, Span, Stream};
use switchyard_cuda::find::NCCL;
use switchyard_cuda::kernels::Element;
use switchyard_cuda::nccl::{Communicator, Nccl, UniqueId};

const COUNT: usize = 1000;

/// A rank's objects.
struct Rank {
    rank: usize,
    context: Context,
    stream: Stream,
    communicators: Vec<Communicator>,
}

fn nccl() -> Nccl {
    Nccl::new(&places().open(&NCCL).unwrap().library).unwrap()
}

/// Waits until a communicator is connected.
fn ready(communicator: Communicator) -> Result<Communicator, Error> {
    while !communicator.is_ready()? {
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(communicator)
}

/// Connects a rank's communicators one after another.
fn connect(ids: &[UniqueId], world: usize, (rank, device): (usize, usize)) -> Result<Rank, Error> {
    let Gpu { context, stream } = Gpu::of(device);
    let connected = ids.iter().map(|id| ready(nccl().connect(&context, id, (rank as u32, world as u32))?));
    let communicators = connected.collect::<Result<_, Error>>()?;
    Ok(Rank { rank, stream, context, communicators })
}

/// Runs all ranks concurrently; `devices` gives each rank's GPU.
fn ranks<T: Send>(
    devices: &[usize],
    communicators: usize,
    program: impl Fn(Result<Rank, Error>) -> T + Sync,
) -> Vec<T> {
    let ids: Vec<UniqueId> = (0..communicators).map(|_| nccl().unique_id().unwrap()).collect();
    std::thread::scope(|scope| {
        let (ids, program) = (&ids, &program);
        let start = |(rank, device): (usize, &usize)| {
            let place = (rank, *device);
            scope.spawn(move || program(connect(ids, devices.len(), place)))
        };
        let threads: Vec<_> = devices.iter().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn of_rank(rank: usize) -> Vec<f32> {
    (0..COUNT).map(|index| number(rank + 1, index)).collect()
}

const TWO: (&str, &str) = ("SWITCHYARD_REFERENCE_DEVICES", "2");

#[test]
fn all_ranks_get_the_same_sum() {
    for seed in ["0", "1", "2"] {
        let variables = [("SWITCHYARD_REFERENCE_DEVICES", "3"), ("SWITCHYARD_REFERENCE_SEED", seed)];
        on_a_device("all_ranks_get_the_same_sum", &variables, || {
            let expected: Vec<f32> =
                (0..COUNT).map(|index| number(1, index) + number(2, index) + number(3, index)).collect();
            let sums = ranks(&[0, 1, 2], 2, |rank| {
                let Rank { rank, context, stream, communicators } = rank.unwrap();
                let [first, second] = [(); 2].map(|()| context.upload(&of_rank(rank)).unwrap());
                communicators[0].register(&first).unwrap();
                let other = context.stream().unwrap();
                communicators[0].all_reduce(first.span(), Element::F32, &stream).unwrap();
                communicators[1].all_reduce(second.span(), Element::F32, &other).unwrap();
                // Ranks wait for different streams first.
                if rank == 0 { &stream } else { &other }.synchronize().unwrap();
                [first, second].map(|buffer| buffer.download::<f32>(0..COUNT).unwrap())
            });
            assert!(sums.iter().flatten().all(|sum| *sum == expected));
        });
        if child::role().is_some() {
            return;
        }
    }
}

#[test]
fn values_are_multiplied_before_they_are_added() {
    on_a_device("values_are_multiplied_before_they_are_added", &[TWO], || {
        let sums = ranks(&[0, 1], 1, |rank| {
            let Rank { rank, context, stream, communicators } = rank.unwrap();
            let buffer = context.upload(&of_rank(rank)).unwrap();
            communicators[0].all_reduce_scaled(buffer.span(), 0.5, &stream).unwrap();
            communicators[0].all_reduce_scaled(buffer.span(), 4.0, &stream).unwrap();
            stream.synchronize().unwrap();
            buffer.download::<f32>(0..COUNT).unwrap()
        });
        // Both ranks have the same sum after the first call.
        let expected = |index| 8.0 * (0.5 * number(1, index) + 0.5 * number(2, index));
        let expected: Vec<f32> = (0..COUNT).map(expected).collect();
        assert!(sums.iter().all(|sum| *sum == expected));
    });
}

#[test]
fn a_failure_of_one_rank_reaches_the_others() {
    let silent = ("SWITCHYARD_REFERENCE_FAULT", "nccl-error:1.1");
    on_a_device("a_failure_of_one_rank_reaches_the_others", &[TWO, silent], || {
        let both_called = Barrier::new(2);
        let errors = ranks(&[0, 1], 1, |rank| {
            let Rank { rank, context, stream, communicators } = rank.unwrap();
            let (buffer, communicator) = (context.upload(&of_rank(rank)).unwrap(), &communicators[0]);
            communicator.all_reduce(buffer.span(), Element::F32, &stream).unwrap();
            let event = context.event().unwrap();
            stream.record(&event).unwrap();
            both_called.wait();
            // A query lets the device make progress, and never waits for other ranks.
            let error = loop {
                assert!(!event.is_done().unwrap());
                if let Err(error) = communicator.is_ready() {
                    break error;
                }
            };
            // Until then the device waits for the other rank.
            communicator.abort();
            event.synchronize().unwrap();
            assert!(buffer.download::<f32>(0..1).unwrap()[0].is_nan(), "the result is invalid");
            assert!(communicator.all_reduce(buffer.span(), Element::F32, &stream).is_err());
            error.to_string()
        });
        assert!(errors[1].contains("returned 2: unhandled system error"), "{errors:?}");
        assert!(errors[0].contains("returned 6: remote process exited"), "{errors:?}");
    });
}

#[test]
fn two_ranks_on_a_gpu_are_refused() {
    on_a_device("two_ranks_on_a_gpu_are_refused", &[], || {
        for error in ranks(&[0, 0], 1, |rank| rank.err().unwrap().to_string()) {
            assert!(error.contains("returned 5: invalid usage"), "{error}");
        }
    });
}

#[test]
fn a_rank_that_cannot_start_reports_it() {
    let fault = ("SWITCHYARD_REFERENCE_FAULT", "nccl-init:0");
    on_a_device("a_rank_that_cannot_start_reports_it", &[fault], || {
        let error = nccl().single_rank(&Gpu::new().context).err().unwrap().to_string();
        assert_eq!(error, "NCCL: ncclCommInitRankConfig returned 2: unhandled system error");
    });
}

#[test]
fn a_missing_rank_leaves_the_others_waiting_until_they_abort() {
    let fault = ("SWITCHYARD_REFERENCE_FAULT", "nccl-absent:1");
    on_a_device("a_missing_rank_leaves_the_others_waiting_until_they_abort", &[TWO, fault], || {
        let id = nccl().unique_id().unwrap();
        let both = [0, 1].map(|rank| nccl().connect(&Gpu::of(rank as usize).context, &id, (rank, 2)).unwrap());
        for communicator in &both {
            assert!(!communicator.is_ready().unwrap());
            communicator.abort();
            assert!(communicator.is_ready().is_err());
        }
    });
}

#[test]
fn other_major_versions_and_old_ones_are_refused() {
    for (version, words) in [("31000", "version 3.10.0; expected 2.19.0"), ("21806", "version 2.18.6; expected 2.19.0")]
    {
        let fault = format!("nccl-version:{version}");
        let variables = [("SWITCHYARD_REFERENCE_FAULT", fault.as_str()), ("EXPECTED_WORDS", words)];
        on_a_device("other_major_versions_and_old_ones_are_refused", &variables, || {
            let error = Nccl::new(&places().open(&NCCL).unwrap().library).err().unwrap().to_string();
            assert!(error.contains(&std::env::var("EXPECTED_WORDS").unwrap()), "{error}");
        });
        if child::role().is_some() {
            return;
        }
    }
}

/// Runs a program on both ranks of a child with two GPUs, with memory for [`COUNT`] values.
fn both(communicators: usize, program: impl Fn(&Rank, Span) + Sync) {
    ranks(&[0, 1], communicators, |rank| {
        let rank = rank.unwrap();
        let buffer = rank.context.upload(&of_rank(rank.rank)).unwrap();
        program(&rank, buffer.span());
        rank.context.synchronize().unwrap();
    });
}

misuse_test! {
    a_sum_must_wait_for_the_writer_of_its_input: "with no order between", |is_right| {
        both(1, |Rank { context, stream, communicators, .. }, memory| {
            let other = context.stream().unwrap();
            let written = context.event().unwrap();
            other.fill(memory, 0).unwrap();
            other.record(&written).unwrap();
            if is_right {
                stream.wait(&written).unwrap();
            }
            communicators[0].all_reduce(memory, Element::F32, stream).unwrap();
        });
    }

    a_sum_must_be_waited_for: "with no order between", |is_right| {
        both(1, |Rank { context, stream, communicators, .. }, memory| {
            let (other, summed) = (context.stream().unwrap(), context.event().unwrap());
            communicators[0].all_reduce(memory, Element::Bf16, stream).unwrap();
            stream.record(&summed).unwrap();
            if is_right {
                other.wait(&summed).unwrap();
            }
            other.fill(memory, 1).unwrap();
        });
    }

    ranks_must_sum_equal_counts: "rank 0 has 1000 numbers of type 7, operation 0, rank 1 has 999 numbers", |is_right| {
        both(1, |Rank { rank, stream, communicators, .. }, memory| {
            let count = if is_right || *rank == 0 { COUNT } else { COUNT - 1 };
            communicators[0].all_reduce(memory.part(0..4 * count).unwrap(), Element::F32, stream).unwrap();
        });
    }

    ranks_must_sum_one_type: "rank 0 has 1000 numbers of type 7, operation 0, rank 1 has 1000 numbers of type 9", |is_right| {
        both(1, |Rank { rank, stream, communicators, .. }, memory| {
            let (bytes, element) = if is_right || *rank == 0 { (4, Element::F32) } else { (2, Element::Bf16) };
            communicators[0].all_reduce(memory.part(0..bytes * COUNT).unwrap(), element, stream).unwrap();
        });
    }

    communicators_must_be_used_in_the_same_order: "the all-reduce in place 2 of its device", |is_right| {
        both(2, |Rank { rank, context, communicators, .. }, memory| {
            let order = if is_right || *rank == 0 { [0, 1] } else { [1, 0] };
            let halves = [0..2 * COUNT, 2 * COUNT..4 * COUNT];
            for communicator in order {
                let half = memory.part(halves[communicator].clone()).unwrap();
                communicators[communicator].all_reduce(half, Element::F32, &context.stream().unwrap()).unwrap();
            }
        });
    }

    uninitialised_memory_must_not_be_summed: "that nobody has written", |is_right| {
        both(1, |Rank { context, stream, communicators, .. }, _| {
            let buffer = context.allocate(64).unwrap();
            if is_right {
                stream.fill(buffer.span(), 0).unwrap();
            }
            communicators[0].all_reduce(buffer.span(), Element::F32, stream).unwrap();
            stream.synchronize().unwrap();
        });
    }
}
