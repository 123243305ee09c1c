//! What the ranks exchange, and in which steps.

use super::Check;
use crate::job::Invalid;
use switchyard_crds as api;
use switchyard_worker_contract::config::{
    Algorithm, Compression, Device, LocalSteps, Nesterov, OuterOptimizer, ParameterServers, ServerPlacement, Sharding,
    SyncPolicy, TopK, Updates,
};

/// Translates the block. The defaults of Nesterov are DiLoCo's (Douillard et al. 2023,
/// arXiv:2311.08105, section 3).
pub(super) fn sync(sync: &api::SyncPolicy, device: Device, check: &mut Check<'_>) -> SyncPolicy {
    let (api::SyncType::Local, Some(every_steps)) = (sync.kind, sync.every_steps) else {
        return SyncPolicy::EveryStep;
    };
    if device == Device::Cuda {
        check.fault("sync.type", "Local on GPUs", "EveryStep: only ranks on CPUs take local steps yet");
    }
    let outer = sync.outer_optimizer.clone().unwrap_or_default();
    let mut number = |name: &str, text: Option<&String>, default: f64| {
        check.decimal_or(&format!("sync.outerOptimizer.{name}"), text, default)
    };
    let outer_optimizer = match outer.kind {
        api::OuterOptimizerType::Average => OuterOptimizer::Average,
        api::OuterOptimizerType::Nesterov => OuterOptimizer::Nesterov(Nesterov {
            learning_rate: number("learningRate", outer.learning_rate.as_ref(), 0.7),
            momentum: number("momentum", outer.momentum.as_ref(), 0.9),
        }),
    };
    SyncPolicy::Local(LocalSteps { every_steps: every_steps.unsigned_abs(), outer_optimizer })
}

/// Translates the block.
pub(super) fn compression(
    compression: &api::Compression,
    device: Device,
    check: &mut Check<'_>,
) -> Option<Compression> {
    let (api::CompressionType::TopK, Some(ratio)) = (compression.kind, &compression.ratio) else { return None };
    if device == Device::Cuda {
        let expected = "None: only ranks on CPUs select gradients yet";
        check.fault("communication.compression.type", "TopK on GPUs", expected);
    }
    Some(Compression::TopK(TopK { ratio: check.decimal("communication.compression.ratio", ratio) }))
}

/// Translates the field.
pub(super) fn algorithm(algorithm: api::Algorithm, device: Device, check: &mut Check<'_>) -> Option<Algorithm> {
    let found = match algorithm {
        api::Algorithm::Auto => return None,
        api::Algorithm::Ring => Algorithm::Ring,
        api::Algorithm::RecursiveDoubling => Algorithm::RecursiveDoubling,
        api::Algorithm::HalvingDoubling => Algorithm::HalvingDoubling,
        api::Algorithm::Tree => Algorithm::Tree,
    };
    if device == Device::Cuda {
        check.fault("communication.algorithm", format!("{found:?} on GPUs"), "Auto: on GPUs, NCCL chooses");
    }
    Some(found)
}

/// See `parameterServer.maxStaleness`.
const DEFAULT_STALENESS: u32 = 4;

/// Translates the block.
pub(super) fn parameter_server(
    communication: &api::Communication,
    device: Device,
    check: &mut Check<'_>,
) -> Option<ParameterServers> {
    let (api::CommunicationMode::ParameterServer, Some(settings)) =
        (communication.mode, &communication.parameter_server)
    else {
        return None;
    };
    if device == Device::Cuda {
        let expected = "Collective: only ranks on CPUs send gradients to servers yet";
        check.fault("communication.mode", "ParameterServer on GPUs", expected);
    }
    let max_staleness = settings.max_staleness.map_or(DEFAULT_STALENESS, i32::unsigned_abs);
    let updates = match (settings.updates, settings.every_steps) {
        (api::Updates::Asynchronous, _) => Updates::Asynchronous { max_staleness },
        (api::Updates::Geo, Some(every_steps)) => {
            Updates::Geo { every_steps: every_steps.unsigned_abs(), max_staleness }
        }
        (api::Updates::Geo, None) | (api::Updates::Synchronous, _) => Updates::Synchronous,
    };
    let placement = match settings.placement {
        api::ServerPlacement::Ranks => ServerPlacement::Ranks,
        api::ServerPlacement::Dedicated => ServerPlacement::Dedicated,
    };
    Some(ParameterServers { servers: settings.servers.unsigned_abs(), placement, updates })
}

/// The fault of dedicated parameter servers where there can be none.
pub(crate) fn dedicated_servers(expected: &str) -> Invalid {
    Invalid {
        field: "spec.engine.communication.parameterServer.placement".into(),
        got: "Dedicated".into(),
        expected: expected.into(),
    }
}

/// Translates the field.
pub(super) fn sharding(sharding: api::Sharding, device: Device, check: &mut Check<'_>) -> Sharding {
    let found = match sharding {
        api::Sharding::None => return Sharding::None,
        api::Sharding::Optimizer => Sharding::Optimizer,
        api::Sharding::Gradients => Sharding::Gradients,
    };
    if device == Device::Cuda {
        check.fault("sharding", format!("{found:?} on GPUs"), "None: only ranks on CPUs share the state yet");
    }
    found
}
