//! `switchyard doctor gpu`: lists this machine's GPU software, missing parts, and fixes.

use crate::args::{Cli, DoctorGpuArgs};
use crate::event_loop::event_loop;
use crate::failure::Failure;
use crate::output::emit;
use crate::text::columns;
use switchyard_core::units::binary;
use switchyard_local::{Worker, software};
use switchyard_worker_contract::exit::Exit;
use switchyard_worker_contract::software::{Gpu, Library, Process, Software};

/// Shows the worker's report.
pub(crate) fn gpu(cli: &Cli, args: &DoctorGpuArgs) -> Result<Exit, Failure> {
    let exit = if args.worker.is_some() { Exit::Usage } else { Exit::Unexpected };
    let worker = Worker::find(args.worker.as_deref()).map_err(|error| Failure::new(error, exit))?;
    let software = event_loop()?.block_on(software(&worker)).map_err(|error| Failure::new(&error, error.exit()))?;
    emit(cli.output, "Software", &software, || screen(&software));
    Ok(Exit::Done)
}

fn screen(Software { libraries, gpus }: &Software) -> String {
    let mut rows = vec![["LIBRARY", "VERSION", "FILE", "FOUND BY"].map(str::to_owned).to_vec()];
    let text = |field: &Option<String>| field.clone().unwrap_or_else(|| "-".to_owned());
    for Library { name, version, file, found_by, .. } in libraries {
        rows.push(vec![name.clone(), text(version), text(file), text(found_by)]);
    }
    let mut lines = vec![columns(&rows).trim_end().to_owned()];
    for (index, Gpu { name, bus, memory_bytes, free_bytes, processes, is_divided }) in gpus.iter().enumerate() {
        let free = free_bytes.map_or_else(String::new, |free| format!(", {} free", binary(free)));
        let divided = if *is_divided { ", divided by MIG" } else { "" };
        lines.push(format!("GPU {index}: {name}, {}{free}, {bus}{divided}", binary(*memory_bytes)));
        for Process { pid, name, memory_bytes } in processes {
            let memory = memory_bytes.map_or_else(String::new, |bytes| format!(", {}", binary(bytes)));
            lines.push(format!("  used by {} (pid {pid}{memory})", name.as_deref().unwrap_or("a process")));
        }
    }
    if gpus.is_empty() {
        lines.push("no GPU".to_owned());
    }
    for Library { problem, remedy, without, .. } in libraries {
        let Some(problem) = problem else { continue };
        let remedy = remedy.as_ref().map_or_else(String::new, |remedy| format!("\n  fix: {remedy}"));
        lines.push(format!("{problem}: {without}{remedy}"));
    }
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn present_and_missing_libraries_are_shown_with_the_fix() {
        let found = Library {
            name: "driver".into(),
            file: Some("/usr/lib/libcuda.so.580.65".into()),
            found_by: Some("the loader".into()),
            version: Some("13.0".into()),
            problem: None,
            remedy: None,
            without: "no job runs on GPUs".into(),
        };
        let missing = Library {
            name: "NCCL".into(),
            file: None,
            found_by: None,
            version: None,
            problem: Some("NCCL is not on this machine".into()),
            remedy: Some("pip install nvidia-nccl-cu13".into()),
            without: "gradients are reduced through host memory".into(),
        };
        let gpu = Gpu {
            name: "NVIDIA H200".into(),
            bus: "0000:17:00.0".into(),
            memory_bytes: 150_109_814_784,
            free_bytes: None,
            processes: Vec::new(),
            is_divided: false,
        };
        let used = Gpu {
            free_bytes: Some(100 << 30),
            processes: vec![Process { pid: 4242, name: Some("python3".into()), memory_bytes: Some(39 << 30) }],
            is_divided: true,
            ..gpu.clone()
        };
        assert_eq!(
            screen(&Software { libraries: vec![found, missing], gpus: vec![gpu, used] }),
            "LIBRARY  VERSION  FILE                        FOUND BY\n\
             driver   13.0     /usr/lib/libcuda.so.580.65  the loader\n\
             NCCL     -        -                           -\n\
             GPU 0: NVIDIA H200, 140 GiB, 0000:17:00.0\n\
             GPU 1: NVIDIA H200, 140 GiB, 100 GiB free, 0000:17:00.0, divided by MIG\n  used by python3 (pid 4242, 39 GiB)\n\
             NCCL is not on this machine: gradients are reduced through host memory\n  fix: pip install nvidia-nccl-cu13\n"
        );
    }
}
