//! The settings of a cluster's controller, from the arguments of its pod.

use super::list::is_our_pod;
use crate::failure::Failure;
use serde_json::Value;
use switchyard_controller::daemon::{ControllerArgs, QueueArgs};
use switchyard_ledger::queue::QueueSettings;
use switchyard_plan::cluster::levels::DomainLevel;
use switchyard_plan::objects::Defaults;

/// Settings with which the controller decides.
pub(crate) struct Settings {
    pub queue: QueueSettings,
    /// All arguments of the queue: NAME=VALUE.
    pub arguments: Vec<String>,
    pub domains: Vec<DomainLevel>,
    pub defaults: Defaults,
    /// Why these are a controller's defaults.
    unknown: Option<String>,
}

impl Settings {
    /// Reads the settings from the controller's pod, if it is among the objects. `changes` are
    /// arguments of the queue that replace its own.
    pub(super) fn of(items: &[Value], changes: &[String]) -> Result<Settings, Failure> {
        let found = controller_arguments(items).ok_or_else(|| "the cluster has no pod of the controller".to_string());
        let (parsed, unknown) = match found.and_then(|arguments| ControllerArgs::of(&arguments)) {
            Ok(parsed) => (parsed, None),
            Err(why) => (ControllerArgs::of(&[]).map_err(Failure::unexpected)?, Some(why)),
        };
        let (controller, mut arguments) = parsed;
        let name = |argument: &String| argument.split('=').next().map(str::to_owned);
        arguments.retain(|argument| changes.iter().all(|change| name(change) != name(argument)));
        arguments.extend(changes.iter().cloned());
        Ok(Settings {
            queue: QueueArgs::parse(&arguments).map_err(|error| Failure::usage(format!("--queue: {error}")))?,
            arguments,
            domains: controller.domains,
            defaults: Defaults {
                gpu_class: controller.gpu_device_class,
                gpu_driver: controller.gpu_driver,
                ..Defaults::default()
            },
            unknown,
        })
    }

    /// The settings that are assumed, and why; `None` if they are the controller's own.
    pub(crate) fn assumption(&self) -> Option<String> {
        let why = self.unknown.as_ref()?;
        Some(format!("{why}; the queue is assumed to have {} (--queue NAME=VALUE)", self.arguments.join(", ")))
    }
}

/// The arguments of the newest pod of a controller.
fn controller_arguments(items: &[Value]) -> Option<Vec<String>> {
    let newest = items
        .iter()
        .filter(|item| is_our_pod(item) && item["metadata"]["labels"]["app.kubernetes.io/component"] == "controller")
        .max_by_key(|pod| pod["metadata"]["creationTimestamp"].as_str())?;
    let arguments =
        newest["spec"]["containers"].as_array()?.iter().find_map(|container| container["args"].as_array())?;
    Some(arguments.iter().filter_map(|argument| Some(argument.as_str()?.to_owned())).collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;
    use switchyard_plan::cluster::queue_policy::QueuePolicy;

    fn pod(created: &str, component: &str, arguments: &[&str]) -> Value {
        json!({
            "kind": "Pod",
            "metadata": {"creationTimestamp": created, "labels": {
                "app.kubernetes.io/name": "switchyard", "app.kubernetes.io/component": component,
            }},
            "spec": {"containers": [{"name": "c", "args": arguments}]},
        })
    }

    #[test]
    fn the_newest_controller_pod_has_the_settings() {
        let items = [
            pod(
                "2026-01-02T00:00:00Z",
                "controller",
                &["--queue-policy=Opportunistic", "--domain=rack", "--gpu-driver=d"],
            ),
            pod("2026-01-01T00:00:00Z", "controller", &["--queue-policy=FirstComeFirstServed"]),
            pod("2026-01-03T00:00:00Z", "node-agent", &["--queue-policy=FirstComeFirstServed"]),
        ];
        let settings = Settings::of(&items, &[]).unwrap();
        assert_eq!(settings.queue.policy.policy, QueuePolicy::Opportunistic);
        assert_eq!((settings.domains.len(), settings.defaults.gpu_driver.as_str()), (1, "d"));
        assert_eq!(settings.assumption(), None);

        let changes = ["queue-policy=LeastAttainedService", "queue-threshold-seconds=60"].map(String::from);
        let policy = Settings::of(&items, &changes).unwrap().queue.policy;
        assert_eq!((policy.policy, policy.thresholds.len()), (QueuePolicy::LeastAttainedService, 1));
        assert_eq!(policy.thresholds[0].as_secs(), 60, "a change replaces all values");
    }

    #[test]
    fn assumed_settings_and_wrong_changes_are_named() {
        let of = |items: &[Value], changes: &[&str]| {
            Settings::of(items, &changes.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        let assumption = of(&[], &["max-preemptions=2"]).unwrap().assumption().unwrap();
        for part in ["no pod of the controller", "queue-policy=LeastAttainedService", "max-preemptions=2", "--queue"] {
            assert!(assumption.contains(part), "{assumption}");
        }
        let newer = [pod("2027-01-01T00:00:00Z", "controller", &["--queue-patience=1"])];
        let assumption = of(&newer, &[]).unwrap().assumption().unwrap();
        assert!(assumption.contains("unexpected argument '--queue-patience'"), "{assumption}");
        for (change, expected) in [
            ("policy=Opportunistic", "--queue: unexpected argument '--policy'"),
            ("queue-policy=Fair", "--queue: invalid value 'Fair'"),
            ("queue-quantum-seconds", "--queue: a value is required"),
        ] {
            let message = of(&[], &[change]).err().unwrap().message;
            assert!(message.starts_with(expected), "{change}: {message}");
        }
    }
}
