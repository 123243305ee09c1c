//! Settings owned by launchers, operators and device plugins: processes, ranks, devices.

use super::{Context, Findings, Message, Severity};
use crate::lint::view::{Count, Kind, Origin, Processes, Variable};
use crate::variables::{is_visible_devices, per_process, rendezvous, set_by_launcher};
use switchyard_core::units::{counted, plural};

/// Values that hide all GPUs from a container that must not have any.
const HIDES_GPUS: [&str; 4] = ["", "none", "void", "-1"];

/// `visible-devices` and `launcher-owned`.
pub(super) fn variable(context: &Context<'_>, variable: &Variable, found: &mut Findings) {
    if is_visible_devices(&variable.name) {
        return devices(context, variable, found);
    }
    // A script can compute these values; a fixed value in a manifest is the same in every process.
    let is_fixed = variable.origin == Origin::Env || variable.text().is_some();
    let is_of_operator = context.workload.kind.sets_torch_rendezvous() && set_by_launcher(&variable.name);
    if variable.origin == Origin::Env && is_of_operator {
        let why = "the operator sets it in every pod, from the number of nodes and the name of the first";
        let fix = format!("delete {}", variable.name);
        found.add("launcher-owned", Severity::Error, &variable.path, Message::of(variable, why, fix));
    } else if variable.origin == Origin::Env
        && let Some(known) = rendezvous(&context.workload.framework).iter().find(|known| known.name == variable.name)
    {
        let fix = format!("delete {}", variable.name);
        let (severity, why) = if known.differs && context.workload.nodes.unwrap_or(1) > 1 {
            (Severity::Error, "it differs from node to node: with one value for all they do not find each other")
        } else {
            (Severity::Warning, "Switchyard sets it from the job, and this value is taken instead")
        };
        found.add("launcher-owned", severity, &variable.path, Message::of(variable, why, fix));
    } else if is_fixed && per_process(&variable.name) {
        let why = "it differs from process to process, and the launcher of the processes sets it: one value makes all of them the same rank";
        let fix = format!("delete {}", variable.name);
        found.add("launcher-owned", Severity::Error, &variable.path, Message::of(variable, why, fix));
    }
}

fn devices(context: &Context<'_>, variable: &Variable, found: &mut Findings) {
    let Some(value) = variable.text() else { return };
    let gpus = context.container.gpus;
    let hides = HIDES_GPUS.contains(&value.trim());
    let (severity, why) = match gpus {
        // A container without GPUs of its own can hide all GPUs to stay away from them.
        Some(0) | None if hides => return,
        Some(gpus) if hides => {
            let why = format!(
                "the pod gets {} and this hides {}",
                counted(gpus, "GPU"),
                if gpus == 1 { "it" } else { "them" }
            );
            (Severity::Error, why)
        }
        _ if variable.name == "NVIDIA_VISIBLE_DEVICES" => {
            let why = "the container runtime gives it these GPUs beside what the device plugin counts: other pods may use them too";
            (Severity::Error, why.to_owned())
        }
        Some(gpus) if value.split(',').count() as u64 != gpus => {
            let listed = value.split(',').count() as u64;
            let why = format!(
                "it lists {}, and the pod asks for {gpus}: the others are paid for and idle, or missing",
                counted(listed, "GPU")
            );
            (Severity::Error, why)
        }
        _ => {
            let why = "the device plugin owns it: inside a pod GPUs count from 0, whatever their numbers on the node";
            (Severity::Warning, why.to_owned())
        }
    };
    let fix = format!("delete {}, and ask for the GPUs in resources.limits", variable.name);
    found.add("visible-devices", severity, &variable.path, Message::of(variable, why, fix));
}

/// `process-count`.
pub(super) fn processes(context: &Context<'_>, found: &mut Findings) {
    let Context { workload, group, container, .. } = context;
    // A field of the job applies to the training container, not to a sidecar without GPUs.
    let trains = group.containers.len() == 1 || container.gpus != Some(0);
    let field = group.processes.as_ref().filter(|_| trains);
    let option = container.processes.as_ref();
    let numbers = |one: &Processes| match one.count {
        Count::Number(number) => Some(number),
        Count::PerGpu | Count::Open => None,
    };
    match (field, option) {
        (Some(field), Some(option)) if numbers(field).zip(numbers(option)).is_some_and(|(one, other)| one != other) => {
            let why = format!("ranks are counted by {}, and the command line starts another number", field.words);
            let fix = format!("delete {}, or make both equal", option.words);
            found.add("process-count", Severity::Error, &option.path, Message::new(&option.words, why, fix));
        }
        // The command line starts the processes.
        _ => {
            if let Some(requested) = option.or(field) {
                against_gpus(requested, container.gpus, found);
            }
        }
    }
    if workload.kind == Kind::MpiJob
        && let (None, Some(gpus)) = (field, container.gpus.filter(|gpus| *gpus > 1))
    {
        let is_worker = group.containers.len() == 1;
        if is_worker {
            let why = format!(
                "slotsPerWorker is 1 when it is absent, and the worker has {gpus} GPUs: mpirun takes one process per worker"
            );
            let fix = format!("set spec.slotsPerWorker: {gpus}");
            found.add("process-count", Severity::Warning, &container.path, Message::new("no slotsPerWorker", why, fix));
        }
    }
}

fn against_gpus(requested: &Processes, gpus: Option<u64>, found: &mut Findings) {
    let Some(gpus) = gpus else { return };
    let (severity, why, fix) = match requested.count {
        Count::PerGpu if gpus == 0 => (
            Severity::Error,
            "the container asks for no GPU: the launcher fails for want of one".to_owned(),
            "ask for GPUs in resources.limits, or give a number of processes".to_owned(),
        ),
        Count::Number(processes) if gpus > 0 && processes > gpus => (
            Severity::Error,
            format!("the container has {}: two ranks on one end with \"Duplicate GPU detected\"", counted(gpus, "GPU")),
            format!("set it to {gpus}"),
        ),
        Count::Number(processes) if processes < gpus => {
            let idle = gpus - processes;
            let why = format!(
                "the container has {gpus} GPUs: {idle} of them get no process and {} idle, unless each process drives several",
                if idle == 1 { "is" } else { "are" }
            );
            (Severity::Warning, why, format!("set it to {gpus}, or ask for {processes} GPU{}", plural(processes)))
        }
        _ => return,
    };
    found.add("process-count", severity, &requested.path, Message::new(&requested.words, why, fix));
}
