//! The whole program on the reference libraries: what is shipped runs, calls the driver, cuBLASLt and NVRTC, and judges what comes back.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)]

use serde_json::Value;
use std::process::Command;

/// Parts that need no library that is missing there.
const PARTS: [&str; 7] = ["driver", "cublaslt", "nvrtc", "compile", "adamw", "streams", "products"];

/// The report of a rehearsal with these variables.
fn rehearse(variables: &[(&str, &str)]) -> Option<Value> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("result.json");
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpu-probe"));
    command.envs(switchyard_cuda_libraries::environment()?).envs(variables.iter().copied());
    let output = command.arg("--rehearse").arg("--json").arg(&file).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let report: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!(report["benchmark"], "gpu-probe rehearsal");
    Some(report)
}

fn part<'a>(report: &'a Value, name: &str) -> &'a Value {
    report["parts"].as_array().unwrap().iter().find(|part| part["part"] == name).unwrap()
}

#[test]
fn every_part_that_has_its_library_is_right_with_any_order_of_streams() {
    for seed in ["0", "1"] {
        let Some(report) = rehearse(&[("SWITCHYARD_REFERENCE_SEED", seed)]) else { return };
        for name in PARTS {
            assert_eq!(part(&report, name)["status"], "Ok", "{}", part(&report, name));
        }
        let figures = |name| &part(&report, name)["figures"];
        assert_eq!(figures("driver")["devices"][0]["multiprocessors"], 132);
        assert_eq!(figures("adamw")["sameBitsAsCpu"], true);
        assert_eq!(figures("adamw")["bf16SameBitsAsCpu"], true);
        assert_eq!(figures("products")["products"].as_array().unwrap().len(), 16);
    }
}

#[test]
fn what_a_device_does_not_do_is_an_outcome_with_its_code() {
    let cases = [
        ("out-of-memory:3", "adamw", "cuMemAlloc", 2, "out of memory"),
        ("launch:2", "adamw", "cuEventSynchronize", 719, "unspecified launch failure"),
        ("lost:1", "adamw", "cuCtxSynchronize", 214, "uncorrectable ECC error encountered"),
        ("busy", "products", "cuDevicePrimaryCtxRetain", 46, "CUDA-capable device(s) is/are busy or unavailable"),
    ];
    for (fault, name, call, code, text) in cases {
        let Some(report) = rehearse(&[("SWITCHYARD_REFERENCE_FAULT", fault)]) else { return };
        let part = part(&report, name);
        assert_eq!((&part["call"], &part["code"], &part["text"]), (&call.into(), &code.into(), &text.into()), "{part}");
    }
    let Some(report) = rehearse(&[("SWITCHYARD_REFERENCE_MEMORY", "1000000")]) else { return };
    assert_eq!(part(&report, "products")["code"], 2, "{}", part(&report, "products"));
}
