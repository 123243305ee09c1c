//! A profiler's view of a run: NVTX ranges, and what is enqueued within them.

use crate::pods::Job;
use crate::support::{Change, RunOutput, amp, gpt, mlp, on, resnet, run};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use switchyard_cuda::nvtx::VARIABLE;
use switchyard_cuda_libraries::{RANGES, RECORDER, environment, folder};
use switchyard_worker_contract::config::*;
use switchyard_worker_contract::kernels::KernelTimes;
use switchyard_worker_contract::prediction::Part;

const STEPS: u64 = 8;
const PROFILE: Profile = Profile { from_step: 3, steps: 2 };

/// A call with its enclosing ranges, outermost first.
#[derive(Debug)]
struct Call {
    ranges: Vec<String>,
    name: String,
}

/// The calls of a process, in order.
///
/// # Errors
/// A range ends that was not open, or never ends.
fn calls(text: &str) -> Result<Vec<Call>, String> {
    let mut open: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    let mut calls = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let (thread, event) = line.split_once(' ').ok_or(format!("line {number}: `{line}`"))?;
        let ranges = open.entry(thread).or_default();
        match event.split_once(' ').unwrap_or((event, "")) {
            ("push", name) => ranges.push(name.to_owned()),
            ("pop", _) => drop(ranges.pop().ok_or(format!("line {number}: no range of thread {thread} is open"))?),
            ("call", name) => calls.push(Call { ranges: ranges.clone(), name: name.to_owned() }),
            _ => return Err(format!("line {number}: `{line}`")),
        }
    }
    match open.values().find(|ranges| !ranges.is_empty()) {
        Some(ranges) => Err(format!("never ended: {ranges:?}")),
        None => Ok(calls),
    }
}

/// Runs with a profiler; returns each rank's calls.
fn run_profiled(job: &Job, extra: &[(&str, &str)]) -> (RunOutput, Vec<Vec<Call>>) {
    let place = job.path("ranges");
    fs::create_dir_all(&place).unwrap();
    let (tool, place) = (folder().join(RECORDER), place.to_str().unwrap().to_owned());
    let of_tool = [(VARIABLE, tool.to_str().unwrap()), (RANGES, place.as_str())];
    let output = run(job, &environment(), &[&of_tool, extra].concat());
    assert!(output.codes.iter().all(|code| *code == 0), "{}", output.log);
    let files = fs::read_dir(&place).unwrap().map(|entry| fs::read_to_string(entry.unwrap().path()).unwrap());
    let ranks = files.map(|text| calls(&text).unwrap_or_else(|error| panic!("{error}\n{text}")));
    (output, ranks.collect())
}

/// The calls of a step, with the ranges inside the step.
fn of_step(calls: &[Call], step: u64) -> Vec<(&[String], &str)> {
    let of_step = calls.iter().filter(|call| call.ranges.first() == Some(&format!("step {step}")));
    of_step.map(|call| (&call.ranges[1..], call.name.as_str())).collect()
}

fn job(ranks: u32, change: impl FnOnce(&mut EngineConfig)) -> Job {
    Job::new(1, ranks, STEPS).with(on(Device::Cuda, STEPS, |config| {
        change(config);
        config.profile = Some(PROFILE);
    }))
}

/// A GPT whose attention uses cuDNN.
fn half_gpt(config: &mut EngineConfig) {
    gpt(config);
    config.precision = amp(HalfType::Bf16, LossScaling::Static { scale: 1.0 });
}

/// The recorder's name for an entry of a profile.
fn recorded(name: &str) -> Option<&str> {
    match name {
        // It does not record the driver's copies.
        "copy" => None,
        "product" => Some("a product"),
        name if name.starts_with("convolution") => Some("a convolution"),
        name if name.starts_with("fused_attention") => Some("a graph of operations"),
        name => Some(name),
    }
}

#[test]
fn calls_are_in_ranges_of_their_part_and_layer_and_graphs_of_their_step() {
    let models: [(&str, Change, u32); 4] =
        [("mlp", mlp, 1), ("gpt", gpt, 2), ("gpt in bf16", half_gpt, 2), ("resnet", resnet, 1)];
    for (name, model, merge) in models {
        let job = job(1, |config| {
            model(config);
            config.batch_merge = merge;
        });
        let (output, ranks) = run_profiled(&job, &[]);
        let [calls] = &ranks[..] else { panic!("{name}: {} processes", ranks.len()) };
        let times: KernelTimes = serde_json::from_str(&job.read("run-0/record/rank-0.kernels.json")).unwrap();
        let mut expected: BTreeMap<(Part, &str), u64> = BTreeMap::new();
        for launches in &times.kernels {
            if let Some(name) = recorded(&launches.name) {
                *expected.entry((launches.part, name)).or_default() += launches.launches;
            }
        }
        let mut found: BTreeMap<(Part, &str), u64> = BTreeMap::new();
        let mut layers = BTreeSet::new();
        for step in [PROFILE.from_step, PROFILE.from_step + 1] {
            for Call { ranges, name: call } in
                calls.iter().filter(|call| call.ranges.first() == Some(&format!("step {step}")))
            {
                let last = format!("micro-batch {}", merge - 1);
                let pass = if ranges[1] == last { "forward, backward and update" } else { "forward and backward" };
                assert!(ranges[1].starts_with("micro-batch ") && ranges[2] == pass, "{name}: {ranges:?}");
                let part = match ranges[3].as_str() {
                    "forward" => Part::Forward,
                    "backward" => Part::Backward,
                    "update" => Part::Update,
                    other => panic!("{name}: {other}"),
                };
                *found.entry((part, call.as_str())).or_default() += 1;
                let layer = ranges.get(4).map(String::as_str);
                assert!(ranges.len() <= 5 && (part != Part::Update || layer.is_none()), "{name}: {ranges:?}");
                layers.extend(layer);
                let is_attention = layer.is_some_and(|layer| layer.ends_with(".attn"));
                let is_of_attention = call.starts_with("attention") || *call == "a graph of operations";
                assert!(!is_of_attention || is_attention, "{name}: {call} in {ranges:?}");
            }
        }
        assert_eq!(found, expected, "{name}");
        let wanted: &[&str] = match name {
            "mlp" => &["layers.0"],
            "gpt" | "gpt in bf16" => &["transformer.h.0.attn", "transformer.h.0.mlp.c_fc", "transformer.ln_f"],
            _ => &["conv1", "layer1.0.conv1"],
        };
        assert!(wanted.iter().all(|layer| layers.contains(layer)), "{name}: {layers:?}");
        assert_eq!(of_step(calls, 1), of_step(calls, PROFILE.from_step), "{name}");
        // The last step consists of graphs, one per micro-batch.
        let graphs: Vec<&Call> =
            calls.iter().filter(|call| call.ranges.first() == Some(&format!("step {STEPS}"))).collect();
        assert_eq!(graphs.len(), merge as usize, "{name}: {graphs:?}");
        for (number, Call { ranges, name: call }) in graphs.iter().enumerate() {
            let last = number as u32 + 1 == merge;
            let pass = if last { "forward, backward and update" } else { "forward and backward" };
            assert_eq!((call.as_str(), &ranges[1..]), ("a graph", &[format!("micro-batch {number}"), pass.into()][..]));
        }
        fs::remove_dir_all(job.path("ranges")).unwrap();
        let expected = run(&job, &environment(), &[]);
        assert_eq!((output.digest, output.calls), (expected.digest, expected.calls), "{name}");
    }
}

#[test]
fn without_graphs_every_step_has_its_layers() {
    let job = job(1, |config| {
        mlp(config);
        config.gpu.graphs = false;
        config.profile = None;
    });
    let (_, ranks) = run_profiled(&job, &[]);
    let last = of_step(&ranks[0], STEPS);
    assert_eq!(of_step(&ranks[0], 1), last);
    let place = ["micro-batch 0", "forward, backward and update", "forward", "layers.0"].map(str::to_owned);
    assert!(last.contains(&(&place, "a product")), "{last:?}");
}

#[test]
fn the_update_of_several_ranks_has_its_own_range() {
    let job = job(2, mlp);
    let (_, ranks) = run_profiled(&job, &[("SWITCHYARD_REFERENCE_DEVICES", "2")]);
    assert_eq!(ranks.len(), 2);
    for calls in ranks {
        let of_last =
            calls.iter().filter(|call| call.ranges.first() == Some(&format!("step {STEPS}")) && call.name == "a graph");
        let last: Vec<&[String]> = of_last.map(|call| &call.ranges[1..]).collect();
        assert_eq!(
            last,
            [&["micro-batch 0".to_owned(), "forward and backward".to_owned()][..], &["update".to_owned()]]
        );
    }
}

#[test]
fn without_a_profiler_nothing_is_recorded_and_invalid_ones_are_reported() {
    let libraries = environment();
    let job = job(1, mlp);
    fs::create_dir_all(job.path("ranges")).unwrap();
    let place = job.path("ranges").to_str().unwrap().to_owned();
    let output = run(&job, &libraries, &[(RANGES, &place)]);
    assert_eq!((output.codes, output.log.contains("profilers")), (vec![0], false), "{}", output.log);
    let (data, recorder) = (job.path("data.txt"), folder().join(RECORDER));
    let nvrtc = libraries.iter().find(|(name, _)| *name == "SWITCHYARD_REFERENCE_NVRTC").unwrap();
    let nvrtc = std::path::Path::new(&nvrtc.1).join("libnvrtc.so.13");
    for (tool, words) in [
        (data, "NVTX: NVTX_INJECTION64_PATH: "),
        (nvrtc, "libnvrtc.so.13 lacks InitializeInjectionNvtx2"),
        // The recorder has no folder to write into.
        (recorder, "libnvtx-recorder.so returned 0, expected another number"),
    ] {
        let with_it = run(&job, &libraries, &[(VARIABLE, tool.to_str().unwrap())]);
        let note = with_it.log.lines().find(|line| line.contains("note: profilers see no ranges: "));
        assert!(note.is_some_and(|note| note.contains(words)), "{}", with_it.log);
        assert_eq!((with_it.codes, &with_it.digest), (vec![0], &output.digest), "{}", with_it.log);
    }
    assert_eq!(fs::read_dir(&place).unwrap().count(), 0);
}

#[test]
fn unbalanced_ranges_are_detected() {
    assert!(calls("1 push a\n1 call b\n1 pop\n").is_ok_and(|calls| calls[0].ranges == ["a"]));
    assert!(calls("1 push a\n2 pop\n").unwrap_err().contains("no range of thread 2"));
    assert!(calls("1 push a\n").unwrap_err().contains("never ended: [\"a\"]"));
}
