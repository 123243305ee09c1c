//! Runs the whole shipped program on the reference libraries: it calls the driver, cuBLASLt and
//! NVRTC, trains, and checks the results.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)]

mod support;
#[path = "support/vectors.rs"]
mod vectors;

use serde_json::Value;
use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use support::{part, parts, probe, probe_without_results, results};
use switchyard_worker_contract::prediction::Gpu;

/// The parts of the two commands of `cargo xtask gpu bundle`, if each takes its expected time.
const FIRST: &str = "machine driver cublaslt nvrtc nccl cudnn streams rates vectors attention convolutions training-gpt \
                     training-resnet steps-gpt kernels-gpt start all-reduce";
const SECOND: &str = "steps-resnet kernels-resnet steps-bert products training-bert memcheck resume training-mlp \
                      steps-gpt-tiny";

/// Stand-ins for Python with PyTorch, compute-sanitizer and Nsight Compute.
const TORCH: &str = r#"#!/bin/sh
echo '{"torch": "a script"}'
while read -r word count; do
    case $word in steps) echo "[[$count, 1]]" ;; *) echo 1048576 ;; esac
done
"#;
const SANITIZER: &str = r#"#!/bin/sh
for word; do case $word in --*|99|10) ;; memcheck|racecheck|synccheck|initcheck) tool=$word ;; *) break ;; esac; done
echo "========= ERROR SUMMARY: 0 errors ($tool)"
[ "$tool" != "$SWITCHYARD_TEST_FINDING" ] || exit 99
while [ "$1" != train ]; do worker=$1; shift; done
exec "$worker" train
"#;
const NCU: &str = r#"#!/bin/sh
for word; do
    case $last in --log-file) log=$word ;; --metrics) metrics=$word ;; --launch-skip) skip=$word ;; esac
    last=$word
done
{
    echo "==PROF== Connected to process 1"
    if [ "$SWITCHYARD_TEST_NCU" = refused ]; then echo "==ERROR== ERR_NVGPUCTRPERM - no permission"; else
        echo '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
        for metric in $(echo "$metrics" | tr , ' '); do
            value=1,000
            [ "$SWITCHYARD_TEST_NCU" != strange ] || value=n/a
            echo "\"$skip\",\"layer_norm_forward\",\"$metric\",\"x\",\"$value\""
        done
    fi
} > "$log"
[ "$SWITCHYARD_TEST_NCU" != fails ] || exit 9
while [ "$1" != train ]; do worker=$1; shift; done
exec "$worker" train
"#;

const SMI: &str = r#"#!/bin/sh
[ "$1" = dmon ] || exit 1
echo "    0 300"
exec sleep 600
"#;

fn script(folder: &Path, name: &str, text: &str) -> PathBuf {
    let file = folder.join(name);
    std::fs::write(&file, text).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
    file
}

/// A rehearsal with this results folder, arguments and environment.
fn rehearsal(folder: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> Command {
    let mut command = probe(folder);
    // What a killed probe leaves behind is removed with the results.
    command.envs(switchyard_cuda_libraries::environment()).env("TMPDIR", folder).envs(variables.iter().copied());
    command.arg("--rehearse").args(arguments);
    command
}

/// Runs a rehearsal to its end and returns its results.
fn rehearse(arguments: &[&str], variables: &[(&str, &str)]) -> Vec<Value> {
    let folder = tempfile::tempdir().unwrap();
    let output = rehearsal(folder.path(), arguments, variables).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    results(folder.path())
}

/// The two commands of the bundle, in which each part takes its expected time; a third one that is
/// killed; and a fourth one.
#[test]
fn repeated_commands_run_every_part_once_those_worth_most_first() {
    let folder = tempfile::tempdir().unwrap();
    let python = script(folder.path(), "python3", TORCH);
    for (name, text) in [("compute-sanitizer", SANITIZER), ("ncu", NCU), ("nvidia-smi", SMI)] {
        script(folder.path(), name, text);
    }
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap_or_default());
    let launches = folder.path().join("vectors");
    vectors::record(&launches);
    let arguments = ["--python", python.to_str().unwrap(), "--vectors", launches.to_str().unwrap()];
    let command = |seed: &str, more: &[&str]| {
        let arguments = [&arguments[..], more].concat();
        rehearsal(folder.path(), &arguments, &[("PATH", &path), ("SWITCHYARD_REFERENCE_SEED", seed)])
    };

    let mut seen = 0;
    let mut within_budget = |seed: &str| {
        let output = command(seed, &["--budget", "360"]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let all = results(folder.path());
        let new: Vec<Value> = all[seen..].to_vec();
        seen = all.len();
        let of = |is_skipped: bool| {
            let chosen = new.iter().filter(|result| (result["status"] == "Skipped") == is_skipped);
            chosen.map(|result| result["part"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        let shown = String::from_utf8(output.stdout).unwrap();
        assert!(shown.contains(&format!("\nskipped: {}\n", of(true).join(", "))), "{shown}");
        (of(false), of(true))
    };
    let ((first, skipped), (second, left)) = (within_budget("0"), within_budget("1"));
    assert_eq!((first.join(" "), second.join(" ")), (FIRST.to_owned(), SECOND.to_owned()));
    assert_eq!(second.iter().chain(&left).collect::<BTreeSet<_>>(), skipped.iter().collect::<BTreeSet<_>>());
    let clocks = std::fs::read_to_string(folder.path().join("clocks.txt")).unwrap();
    assert_eq!(clocks, "    0 300\n".repeat(2));
    // All parts use this cache, in which the second command finds what the first compiled.
    assert!(std::fs::read_dir(folder.path().join("cache")).unwrap().count() > 0);

    let mut third = command("0", &[]).stdout(Stdio::null()).spawn().unwrap();
    let start = Instant::now();
    while results(folder.path()).len() == seen {
        assert!(
            start.elapsed() < Duration::from_secs(600) && third.try_wait().unwrap().is_none(),
            "it makes no progress"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
    // SIGKILL, so that it cannot clean up.
    third.kill().unwrap();
    third.wait().unwrap();
    let before = results(folder.path());
    assert!(before.len() < seen + left.len(), "it finished before it was killed");

    let output = command("1", &[]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let all = results(folder.path());
    assert_eq!(all[..before.len()], before, "existing results are kept");
    let all: Vec<Value> = all.into_iter().filter(|result| result["status"] != "Skipped").collect();
    let mut names: Vec<&str> = all.iter().map(|result| result["part"].as_str().unwrap()).collect();
    let parts = parts();
    names.sort_by_key(|name| parts.iter().position(|part| part == name));
    assert_eq!(names, parts, "every part runs once");
    for result in &all {
        assert_eq!(result["status"], "Ok", "{result}");
        assert_eq!(result["rehearsal"], true);
    }
    let figures = |name| &part(&all, name)["figures"];
    assert_eq!(figures("driver")["devices"][0]["multiprocessors"], 132);
    let rates = figures("rates")["deviceFile"].to_string();
    let device = Gpu::parse(&rates, "rates").unwrap();
    assert!(device.launch_seconds > Some(0.0) && device.products.fp8 > Some(0.0), "{rates}");
    assert_eq!(figures("products")["products"].as_array().unwrap().len(), 16);
    assert_eq!(figures("convolutions")["convolutions"].as_array().unwrap().len(), 5);
    assert_eq!(figures("cudnn")["deviceProperties"]["deviceVer"], 900);
    assert_eq!(figures("streams")["waitsInGraph"], 5);
    let error = figures("attention")["relativeErrors"]["queries"].as_f64();
    assert!(error.is_some_and(|error| error < 0.02), "{error:?}");
    assert!(figures("attention")["backward"]["microseconds"].is_number());
    assert_eq!(figures("training-gpt")["checks"].as_array().unwrap().len(), 8);
    let kernels = figures("kernels-gpt")["kernels"].as_array().unwrap();
    for judged in ["layer_norm_forward", "layer_norm_backward", "cross_entropy", "optimizer_step"] {
        let row = kernels.iter().find(|row| row["kernel"] == judged).unwrap_or_else(|| panic!("{judged}: {kernels:?}"));
        // The reference libraries count operations instead of time.
        assert!(row["ratio"].as_f64() > Some(0.0) && row["goal"] == 1.4 && row["isWithinGoal"].is_boolean(), "{row}");
    }
    let flops = |name: &str| figures("kernels-gpt")[name].as_f64().unwrap();
    assert!(flops("palmTFLOP") > 0.0 && flops("neededTFLOP") > 0.0);
    let attention = serde_json::json!({"queried": 1, "accepted": 1});
    let paths = &figures("steps-gpt")["sides"][0]["paths"];
    assert_eq!((&paths["attention"], &paths["attentionGradient"]), (&attention, &attention), "{paths}");
    assert_eq!((&paths["epilogues"], &paths["fallbacks"]), (&true.into(), &Value::Null), "{paths}");
    let convolutions = &figures("steps-resnet")["sides"][0]["paths"]["convolutions"];
    assert!(convolutions["queried"].as_u64() > Some(10), "{convolutions}");
    assert_eq!(convolutions["queried"], convolutions["accepted"]);
    for row in figures("memory")["models"].as_array().unwrap() {
        let number = |name: &str| row[name].as_f64().unwrap_or_else(|| panic!("{name}: {row}"));
        assert!(number("ratio") > 0.3 && number("ratio") < 1.0 && row["trainedSteps"] == 2, "{row}");
        assert_eq!((number("largestF32"), number("goal"), number("batchGoal")), (9.0, 0.6, 2.0), "{row}");
        assert_eq!(row["isWithinBatchGoal"], number("largestBf16") >= 18.0, "{row}");
    }
    let input = figures("input-resnet");
    let figure = |side: usize, name: &str| input["sides"][side][name].as_f64().unwrap_or_else(|| panic!("{input}"));
    let ratio = input["ratio"].as_f64().unwrap();
    assert!((ratio - figure(0, "perSecond") / figure(1, "perSecond")).abs() < 0.01 * ratio, "{input}");
    assert_eq!((&input["goal"], &input["isWithinGoal"]), (&0.97.into(), &(ratio >= 0.97).into()), "{input}");
    assert!(figure(0, "inputMs") >= 0.0 && input["sides"][0]["side"] == "file", "{input}");
    let counters = figures("counters");
    let row = &counters["kernels"][0];
    assert_eq!(
        (&row["kernel"], &row["occupancyPercent"]),
        (&"layer_norm_forward".into(), &1000.0.into()),
        "{counters}"
    );
    assert_eq!((&row["GBs"], &counters["launchesOfStep"]), (&2.0.into(), &1.into()), "{counters}");
    // From the script: four steps of one millisecond, with two sequences of eight tokens.
    let sides = figures("steps-gpt")["sides"].as_array().unwrap();
    assert_eq!(
        (&sides[1]["ms"], &sides[1]["perSecond"], &sides[1]["memoryMiB"]),
        (&4.0.into(), &4000.0.into(), &1.into())
    );
    assert!(sides[0]["ms"].as_f64().unwrap() > 0.0, "{sides:?}");
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(shown.ends_with("34 ok, 0 absent, 0 failed\n"), "{shown}");
}

#[test]
fn wrong_device_results_fail_every_check() {
    let parts = ["training-mlp", "resume", "products", "convolutions"];
    let arguments: Vec<&str> = parts.iter().flat_map(|part| ["--only", part]).collect();
    let results = rehearse(&arguments, &[("SWITCHYARD_REFERENCE_FAULT", "wrong:1")]);
    for name in parts {
        assert_eq!(part(&results, name)["status"], "Failed", "{}", part(&results, name));
    }
    for check in part(&results, "training-mlp")["figures"]["checks"].as_array().unwrap() {
        assert_eq!((&check["outcome"]["status"], &check["outcome"]["call"]), (&"Failed".into(), &check["check"]));
    }
}

#[test]
fn a_fallback_fails_the_measurement_and_keeps_its_figures() {
    let cases = [
        ("cublaslt-bare", "what follows products is computed by kernels of ours: "),
        ("cudnn-refused:0", "kernels of ours: attention "),
        ("cudnn-version:91000", "attention: kernels of ours: "),
    ];
    for (fault, reason) in cases {
        let variables = [("SWITCHYARD_REFERENCE_FAULT", fault)];
        let results = rehearse(&["--only", "steps-gpt", "--only", "kernels-gpt"], &variables);
        for name in ["steps-gpt", "kernels-gpt"] {
            let result = part(&results, name);
            assert_eq!((&result["status"], &result["call"]), (&"Failed".into(), &"fallback".into()), "{result}");
            assert!(result["text"].as_str().unwrap().starts_with(reason), "{fault}: {result}");
            let figures = &result["figures"];
            let figures = if name == "kernels-gpt" { figures } else { &figures["sides"][0]["outcome"]["figures"] };
            assert!(figures["kernelMs"].is_number() || figures["ms"].is_number(), "{result}");
            assert_eq!(figures["paths"]["epilogues"], fault != "cublaslt-bare", "{result}");
        }
    }
}

#[test]
fn a_launch_that_differs_from_the_executor_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let launches = folder.path().join("vectors");
    let arguments = ["--only", "vectors", "--vectors", launches.to_str().unwrap()];
    let absent = rehearse(&arguments, &[]);
    let absent = part(&absent, "vectors");
    assert_eq!((&absent["reason"], &absent["lookedFor"][0]), (&"no vectors".into(), &arguments[3].into()), "{absent}");

    vectors::record(&launches);
    let result = |name: &str| part(&rehearse(&arguments, &[]), name).clone();
    let right = result("vectors");
    assert_eq!((&right["status"], &right["figures"]["played"]), (&"Ok".into(), &2.into()), "{right}");
    let kernels = [("convert", true), ("layer_norm_forward", false)];
    for (row, (kernel, is_exact)) in right["figures"]["kernels"].as_array().unwrap().iter().zip(kernels) {
        assert_eq!((&row["kernel"], &row["isExact"], &row["different"]), (&kernel.into(), &is_exact.into(), &0.into()));
        assert!(row["numbers"].as_u64() > Some(100) && row["bytes"].as_u64() > Some(1000), "{row}");
    }

    // Changes one byte of the expected content: in a value of the second row, in the gap behind the
    // first, and in a read-only buffer.
    let all =
        [("y", 83, "number 41: got"), ("y", 67, "number 33: got NaN (0xffff), expected"), ("x", 4, "byte 4: got")];
    for (buffer, byte, place) in all {
        vectors::record(&launches);
        vectors::plant(&launches, buffer, byte);
        let wrong = result("vectors");
        assert_eq!((&wrong["status"], &wrong["call"]), (&"Failed".into(), &"layer_norm_forward".into()), "{wrong}");
        let text = wrong["text"].as_str().unwrap();
        let place = format!("1 of 1 cases are wrong; the first: case 0, `{buffer}`, {place}");
        assert!(text.starts_with(&place) && text.contains("layer_norm.cu -DELEMENT=bf16 -DWIDTH=33"), "{text}");
        assert_eq!(
            wrong["figures"]["kernels"].as_array().unwrap().len(),
            2,
            "correct results are reported alongside: {wrong}"
        );
    }
}

#[test]
fn a_sanitizer_finding_is_a_failure() {
    let folder = tempfile::tempdir().unwrap();
    script(folder.path(), "compute-sanitizer", SANITIZER);
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap_or_default());
    let variables = [("PATH", path.as_str()), ("SWITCHYARD_TEST_FINDING", "racecheck")];
    let results = rehearse(&["--only", "memcheck", "--only", "racecheck"], &variables);
    assert_eq!(part(&results, "memcheck")["figures"]["said"], "========= ERROR SUMMARY: 0 errors (memcheck)");
    let result = part(&results, "racecheck");
    assert_eq!((&result["status"], &result["code"]), (&"Failed".into(), &99.into()), "{result}");
    assert_eq!(result["text"], "========= ERROR SUMMARY: 0 errors (racecheck)");
}

#[test]
fn refused_malformed_and_missing_counters_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    script(folder.path(), "ncu", NCU);
    let own = std::env::var("PATH").unwrap_or_default();
    let path = format!("{}:{own}", folder.path().display());
    let outcome = |path: &str, fault: &str| {
        let results = rehearse(&["--only", "counters"], &[("PATH", path), ("SWITCHYARD_TEST_NCU", fault)]);
        part(&results, "counters").clone()
    };
    let refused = outcome(&path, "refused");
    let text = refused["text"].as_str().unwrap();
    assert!(text.starts_with("counted no launch of ") && text.ends_with("ERR_NVGPUCTRPERM - no permission"), "{text}");
    let strange = outcome(&path, "strange");
    let text = strange["text"].as_str().unwrap();
    assert!(text.ends_with("has no gpu__time_duration.sum, expected a number"), "{text}");
    let fails = outcome(&path, "fails");
    assert_eq!((&fails["status"], &fails["code"]), (&"Failed".into(), &9.into()), "{fails}");
    let absent = outcome(&own, "");
    if absent["status"] != "Ok" {
        assert_eq!((&absent["status"], &absent["reason"]), (&"Absent".into(), &"no ncu".into()), "{absent}");
    }
}

#[test]
fn device_errors_are_outcomes_with_their_code() {
    let cases = [
        ("out-of-memory:3", "streams", "cuMemAlloc", 2, "out of memory"),
        ("launch:2", "streams", "cuCtxSynchronize", 719, "unspecified launch failure"),
        ("lost:1", "streams", "cuCtxSynchronize", 214, "uncorrectable ECC error encountered"),
        ("busy", "products", "cuDevicePrimaryCtxRetain", 46, "CUDA-capable device(s) is/are busy or unavailable"),
    ];
    for (fault, name, call, code, text) in cases {
        let results = rehearse(&["--only", name], &[("SWITCHYARD_REFERENCE_FAULT", fault)]);
        let part = part(&results, name);
        assert_eq!((&part["call"], &part["code"], &part["text"]), (&call.into(), &code.into(), &text.into()), "{part}");
    }
    let variables = [("SWITCHYARD_REFERENCE_MEMORY", "1000000")];
    let results = rehearse(&["--only", "products", "--only", "steps-gpt"], &variables);
    assert_eq!(part(&results, "products")["code"], 2, "{}", part(&results, "products"));
    let steps = part(&results, "steps-gpt");
    assert!(steps["text"].as_str().unwrap().contains("MiB"), "the required memory: {steps}");
}

/// Running processes with this text in their environment.
fn processes(text: &str) -> Vec<String> {
    let of = |pid: &String| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        String::from_utf8_lossy(&environment).contains(text)
    };
    let entries = std::fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.file_name().display().to_string());
    entries.filter(|name| name.parse::<u32>().is_ok()).filter(of).collect()
}

#[test]
fn a_hung_kernel_fails_only_its_part_and_leaves_nothing_behind() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = scratch.path().display().to_string();
    let arguments = ["--only", "training-mlp", "--only", "nvrtc", "--limit", "10"];
    let variables = [("SWITCHYARD_REFERENCE_FAULT", "hang:3"), ("TMPDIR", folder.as_str())];
    let results = rehearse(&arguments, &variables);
    assert_eq!(part(&results, "nvrtc")["status"], "Ok");
    let result = part(&results, "training-mlp");
    assert_eq!((&result["status"], &result["call"]), (&"Failed".into(), &"time limit".into()), "{result}");
    while !processes(&folder).is_empty() {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "scratch folders are removed");
}

#[test]
fn a_failing_worker_reports_the_reason() {
    let variables = [("SWITCHYARD_REFERENCE_FAULT", "lost:9")];
    let results = rehearse(&["--only", "training-mlp"], &variables);
    let result = part(&results, "training-mlp");
    assert_eq!((&result["status"], &result["code"]), (&"Failed".into(), &5.into()), "{result}");
    assert!(result["text"].as_str().unwrap().contains("uncorrectable ECC error"), "{result}");
}

#[test]
fn recorded_losses_replace_trainings_on_the_cpu() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("cpu-losses.json");
    let mut record = probe_without_results();
    let output = record.args(["--rehearse", "--record-cpu-losses"]).arg(&file).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let losses = || {
        let results =
            rehearse(&["--only", "training-gpt", "--only", "resume", "--cpu-losses", file.to_str().unwrap()], &[]);
        let [gpt, resume] = ["training-gpt", "resume"].map(|name| part(&results, name).clone());
        let checks = gpt["figures"]["checks"].as_array().unwrap().clone();
        let recorded: Vec<bool> = checks.iter().filter_map(|row| row["cpuIsRecorded"].as_bool()).collect();
        (gpt["status"].clone(), recorded, resume["status"].clone(), resume["figures"]["cpuIsRecorded"].clone())
    };
    assert_eq!(losses(), ("Ok".into(), vec![true; 4], "Ok".into(), true.into()));

    // They are what the GPU is compared with.
    let mut recorded: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    for run in recorded.as_object_mut().unwrap().values_mut() {
        run["losses"][0] = 1e3.into();
    }
    std::fs::write(&file, recorded.to_string()).unwrap();
    let (gpt, _, resume, _) = losses();
    assert_eq!((gpt, resume), ("Failed".into(), "Failed".into()));

    std::fs::remove_file(&file).unwrap();
    assert_eq!(losses(), ("Ok".into(), vec![false; 4], "Ok".into(), false.into()));
}
