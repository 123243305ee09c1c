//! Runs the range recorder under a program built with NVIDIA's own headers, to show that it does
//! not only work with our tables.
#![allow(clippy::unwrap_used)]

use std::process::Command;
use switchyard_cuda_libraries::{RANGES, RECORDER, folder};
use switchyard_cuda_reference::fetched;

const PROGRAM: &str = r#"
#include <nvtx3/nvToolsExt.h>
int main(void) {
    nvtxRangePushA("outer");
    nvtxRangePushA("inner");
    nvtxRangePop();
    nvtxRangePop();
    return 0;
}
"#;

#[test]
fn ranges_of_a_program_with_nvidias_headers_are_recorded() {
    let headers = fetched("nvtx-header");
    let place = tempfile::tempdir().unwrap();
    let (source, program, ranges) =
        (place.path().join("ranges.c"), place.path().join("program"), place.path().join("ranges"));
    std::fs::write(&source, PROGRAM).unwrap();
    std::fs::create_dir(&ranges).unwrap();
    let mut compiler = Command::new("cc");
    let built = compiler.arg("-I").arg(headers).arg(&source).arg("-o").arg(&program).arg("-ldl").output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let run = |tool: bool| {
        let mut command = Command::new(&program);
        command.env(RANGES, &ranges).env_remove("NVTX_INJECTION64_PATH");
        if tool {
            command.env("NVTX_INJECTION64_PATH", folder().join(RECORDER));
        }
        assert!(command.status().unwrap().success());
        std::fs::read_dir(&ranges).unwrap().map(|file| file.unwrap().path()).collect::<Vec<_>>()
    };
    assert!(run(false).is_empty());
    let files = run(true);
    assert_eq!(files.len(), 1, "{files:?}");
    assert_eq!(std::fs::read_to_string(&files[0]).unwrap(), "1 push outer\n1 push inner\n1 pop\n1 pop\n");
}
