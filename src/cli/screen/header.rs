//! The header of a run: model, data, hardware and duration.

use super::entropies;
use switchyard_core::units::{binary, counted, grouped, three_digits};
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_plan::local::LocalPlan;
use switchyard_worker_contract::config::{
    Checkpoint, EngineConfig, HalfType, LossScaling, Pipeline, Precision, Source, idle_share,
};
use switchyard_worker_contract::event::Inspection;

/// The header of a run: model, data, hardware and duration.
pub(crate) fn header(plan: &LocalPlan, inspection: &Inspection, run_dir: &str, topology: &GPUTopology) -> String {
    let engine = &plan.engine;
    let mut lines = vec![format!("{}  {run_dir}", plan.job)];
    let mut line = |name: &str, text: String| lines.push(format!("  {name:<8} {text}"));
    line(
        "model",
        format!(
            "{}, {} parameters, {}",
            inspection.model,
            millions(inspection.parameters),
            precision_words(engine.precision)
        ),
    );
    line("memory", memory_words(inspection));
    line("data", data_words(engine, inspection));
    line("machine", format!("{}; kernels {}", machine(topology), inspection.kernel));
    for gpu in &plan.gpus {
        line("gpu", format!("rank {} on {gpu}", gpu.rank));
    }
    line("place", plan.reason.replace(", out of ", ",\n           out of "));
    if let Some(servers) = engine.parameter_server {
        let hosts = (0..servers.servers).map(|server| servers.host(server, plan.world()).to_string());
        let place = match inspection.server_memory_bytes.filter(|_| servers.dedicated() > 0) {
            Some(bytes) => format!("each in a process of its own, at most {}", binary(bytes)),
            None => format!("with ranks {}", hosts.collect::<Vec<_>>().join(", ")),
        };
        line("servers", format!("{servers}; {place}"));
    }
    if let Some(pipeline) = engine.pipeline {
        line("stages", stages_words(pipeline, engine.batch_merge, plan.world()));
    }
    line(
        "steps",
        format!(
            "{} of {} x {}{}",
            grouped(inspection.total_steps),
            grouped(inspection.samples_per_step),
            inspection.sample,
            merge_words(engine)
        ),
    );
    if let Some(checkpoint) = &engine.checkpoint {
        line("saved", checkpoint_words(checkpoint));
    }
    if let Some((unigram, bigram)) = entropies(inspection) {
        let split = if inspection.validation_items > 0 { "validation" } else { "training" };
        line("entropy", format!("unigram {unigram:.3}, bigram {bigram:.3} nats per token of the {split} text"));
    }
    lines.join("\n")
}

pub(crate) fn precision_words(precision: Precision) -> String {
    let Precision::Amp(amp) = precision else { return "FP32".into() };
    let format = match amp.compute_type {
        HalfType::Bf16 => "BF16",
        HalfType::Fp16 => "FP16",
    };
    match amp.loss_scaling {
        LossScaling::Static { scale: 1.0 } => format!("AMP {format}"),
        LossScaling::Static { scale } => format!("AMP {format}, loss x {}", three_digits(scale)),
        LossScaling::Dynamic { initial_scale, .. } => {
            format!("AMP {format}, loss x {} at first", three_digits(initial_scale))
        }
    }
}

/// `61 MiB per rank, 58 % of FP32's 105 MiB`, or `61 MiB per rank, and 3.0 GiB of its GPU`.
fn memory_words(inspection: &Inspection) -> String {
    let total = inspection.memory.total();
    let mut words = format!("{} per rank", binary(total));
    if let Some(full) = inspection.fp32_memory_bytes.filter(|full| *full > 0) {
        let share = 100.0 * total as f64 / full as f64;
        words.push_str(&format!(", {share:.0} % of FP32's {}", binary(full)));
    }
    if let Some(kept) = inspection.kept_activation_bytes {
        words.push_str(&format!(
            ", {} of activations instead of {}",
            binary(inspection.memory.activations),
            binary(kept)
        ));
    }
    if let Some(gpu) = &inspection.gpu_memory {
        words.push_str(&format!(", and {} of its GPU", binary(gpu.total())));
        if let Some(full) = inspection.gpu_fp32_memory_bytes.filter(|full| *full > 0) {
            let share = 100.0 * gpu.total() as f64 / full as f64;
            words.push_str(&format!(", {share:.0} % of FP32's {}", binary(full)));
        }
    }
    words
}

fn data_words(engine: &EngineConfig, inspection: &Inspection) -> String {
    let source = match engine.data.source {
        Source::Synthetic(_) => "made up from the seed".to_string(),
        _ => format!("{}, {}", counted(inspection.files, "file"), binary(inspection.bytes)),
    };
    let validation = format!("{} {} for validation", grouped(inspection.validation_items), inspection.item.word());
    format!("{source}; {} steps/epoch; {validation}", grouped(inspection.steps_per_epoch))
}

/// `in ckpt every 600 s and every 500 steps, 2 are kept`.
fn checkpoint_words(checkpoint: &Checkpoint) -> String {
    let mut times = Vec::new();
    if checkpoint.period_seconds > 0 {
        times.push(format!("every {} s", grouped(checkpoint.period_seconds)));
    }
    if checkpoint.every_steps > 0 {
        times.push(format!("every {} steps", grouped(checkpoint.every_steps)));
    }
    if checkpoint.on_suspend {
        times.push("when stopped".into());
    }
    let times = if times.is_empty() { "never".to_string() } else { times.join(", ") };
    format!("in {}: {times}; {} kept", checkpoint.path, checkpoint.keep)
}

/// `2 stages in 3 pipelines, the first on ranks 0, 1; a stage waits for others in 20 % of a step or
/// more`.
fn stages_words(pipeline: Pipeline, merge: u32, world: u32) -> String {
    let place = pipeline.place(0, world);
    let ranks: Vec<String> = (0..place.stages).map(|stage| place.in_stage(stage).to_string()).collect();
    let pipelines = counted(place.replicas.into(), "pipeline");
    let idle = 100.0 * idle_share(place.stages, merge);
    format!(
        "{} in {pipelines}, the first on ranks {}; a stage waits for others in {idle:.0} % of a step or more",
        counted(place.stages.into(), "stage"),
        ranks.join(", ")
    )
}

fn merge_words(engine: &EngineConfig) -> String {
    if engine.batch_merge > 1 {
        format!(", merged from {} micro-batches per rank", engine.batch_merge)
    } else {
        String::new()
    }
}

/// One line about the machine.
fn machine(topology: &GPUTopology) -> String {
    let status = topology.status.clone().unwrap_or_default();
    let cpus = status.cpus.unwrap_or_default();
    let mut parts = vec![counted(u64::from(cpus.cores.or(cpus.threads).unwrap_or_default()), "core")];
    parts.push(counted(status.numa_nodes.len().max(1) as u64, "NUMA node"));
    parts.extend(status.memory_bytes.map(binary));
    parts.push(if status.gpus.is_empty() { "no GPU".into() } else { counted(status.gpus.len() as u64, "GPU") });
    parts.join(", ")
}

pub(crate) fn millions(parameters: u64) -> String {
    if parameters >= 1_000_000_000 {
        format!("{:.2} B", parameters as f64 / 1e9)
    } else {
        format!("{:.2} M", parameters as f64 / 1e6)
    }
}
