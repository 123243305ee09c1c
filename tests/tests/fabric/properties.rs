//! Invariants for every fixture and any environment.

use super::scenes::{JOBS, Job, SCENES, Scene, items, look, look_at, manifest};
use serde_json::{Value, json};
use switchyard_crds::{DecisionOutcome, FabricStatus};
use switchyard_fabric::profile::Profile;
use switchyard_plan::objects::Defaults;
use switchyard_tests::random::Random;

fn all() -> impl Iterator<Item = (&'static Scene, &'static Job)> {
    SCENES.iter().flat_map(|scene| JOBS.iter().map(move |job| (scene, job)))
}

#[test]
fn every_decision_has_a_reason_and_evidence_and_fits_the_status() {
    let mut count = 0;
    for (scene, job) in all() {
        let Ok(fabric) = look(scene, job).fabric else { continue };
        for decision in &fabric.decisions {
            let at = format!("{} {} {}", scene.name, job.name, decision.name);
            assert!(decision.reason.len() >= 10 && decision.reason.len() <= 512, "{at}: {}", decision.reason);
            assert!(decision.evidence.len() >= 5 && decision.evidence.len() <= 512, "{at}: {}", decision.evidence);
            assert!(decision.link.starts_with("https://"), "{at}");
            assert_eq!(decision.value.is_some(), decision.outcome != DecisionOutcome::NotSet, "{at}");
            count += 1;
        }
        assert!(serde_json::to_string(&fabric).unwrap().len() < 64 << 10, "{} {}", scene.name, job.name);
    }
    assert!(count > 1000, "{count}");
}

#[test]
fn every_setting_reaches_the_pod() {
    let mut count = 0;
    for (scene, job) in all() {
        let found = look(scene, job);
        let Ok(fabric) = &found.fabric else { continue };
        for decision in fabric.decisions.iter().filter(|decision| decision.outcome == DecisionOutcome::Set) {
            let (name, value) = (&decision.name, decision.value.as_deref().unwrap());
            let in_env = found.pod["env"].as_array().unwrap().iter().any(|entry| {
                entry["name"] == json!(name) && (entry["value"] == json!(value) || entry["valueFrom"].is_object())
            });
            let line = format!("{name}={value}");
            let in_file = found.files.iter().flatten().any(|(_, text)| text.lines().any(|other| other == line));
            assert!(in_env != in_file, "{} {} {line}: env {in_env}, file {in_file}", scene.name, job.name);
            count += 1;
        }
    }
    assert!(count > 200, "{count}");
}

#[test]
fn no_debugging_variable_is_set() {
    for (scene, job) in all() {
        let Ok(fabric) = look(scene, job).fabric else { continue };
        let set = fabric.decisions.iter().filter(|decision| decision.outcome == DecisionOutcome::Set);
        for decision in set {
            assert_ne!(decision.class, switchyard_crds::DecisionClass::Never, "{} {}", scene.name, decision.name);
        }
    }
}

/// Names covered by rules, names that packs set, and others.
const NAMES: [&str; 14] = [
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_HCA",
    "NCCL_NET",
    "NCCL_DEBUG",
    "NCCL_CONF_FILE",
    "NCCL_IB_TC",
    "NCCL_IB_TIMEOUT",
    "NCCL_IB_DISABLE",
    "NCCL_IB_ADDR_FAMILY",
    "NCCL_ALGO",
    "GLOO_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME",
    "HOROVOD_GLOO_IFACE",
    "MY_OWN",
];

#[test]
fn no_user_value_is_overridden() {
    let random = Random::new(7);
    let mut user_values = 0;
    for round in 0..600 {
        let scene = &SCENES[random.below(SCENES.len())];
        let job = &JOBS[random.below(JOBS.len())];
        let mut manifest = manifest(scene, job);
        let own: Vec<(&str, String)> = NAMES
            .iter()
            .filter(|_| random.below(3) == 0)
            .map(|name| (*name, format!("value-{}", random.below(1000))))
            .collect();
        // Half of them go into the pod template, where users of other operators put them.
        let entries: Vec<Value> = own.iter().map(|(name, value)| json!({"name": name, "value": value})).collect();
        let mut value = serde_json::to_value(&manifest).unwrap();
        if round % 2 == 0 {
            value["spec"]["trainer"]["env"] = json!(entries);
        } else {
            value["spec"]["trainer"]["env"] = json!([]);
            value["spec"]["template"]["spec"]["containers"] = json!([{"name": "trainer", "env": entries}]);
        }
        manifest = serde_json::from_value(value).unwrap();
        let found = look_at(&items(scene), manifest, Defaults::default());
        let env = found.pod["env"].as_array().unwrap();
        for (name, value) in &own {
            let got: Vec<&Value> = env.iter().filter(|entry| entry["name"] == *name).collect();
            assert_eq!(got.len(), 1, "{name} {env:?}");
            assert_eq!(got[0]["value"], json!(value), "{} {} {name}", scene.name, job.name);
            let Ok(fabric) = &found.fabric else { continue };
            let decisions: Vec<_> = fabric.decisions.iter().filter(|decision| decision.name == *name).collect();
            assert!(decisions.iter().all(|decision| decision.outcome == DecisionOutcome::User), "{name} {decisions:?}");
            assert!(decisions.iter().all(|decision| decision.value.as_deref() == Some(value)), "{name} {decisions:?}");
            // A variable in the environment must not appear in a file: NCCL would ignore it there,
            // but it would mislead readers.
            let files = found.files.iter().flatten();
            assert!(
                files.clone().all(|(_, text)| !text.lines().any(|line| line.starts_with(&format!("{name}=")))),
                "{name}"
            );
            user_values += 1;
        }
    }
    assert!(user_values > 1500, "{user_values}");
}

fn with_profile(scene: &str, job: &str, profile: &str) -> Result<FabricStatus, String> {
    let scene = SCENES.iter().find(|other| other.name == scene).unwrap();
    let job = JOBS.iter().find(|other| other.name == job).unwrap();
    let profile = Profile::parse(profile).map_err(|error| error.to_string())?;
    let defaults = Defaults { fabric_profile: Some(profile), ..Defaults::default() };
    look_at(&items(scene), manifest(scene, job), defaults).fabric
}

#[test]
fn an_administrators_profile_overrides_the_pack_and_is_reported() {
    let text = "name: rails\nextends: roce\nsettings: [{name: NCCL_IB_TC, value: '106', reason: queue 3 of our switches, link: 'https://wiki/'}]";
    let fabric = with_profile("h200-roce-v4", "torch", text).unwrap();
    let tc = fabric.decisions.iter().find(|decision| decision.name == "NCCL_IB_TC").unwrap();
    assert_eq!((tc.outcome, tc.value.as_deref()), (DecisionOutcome::Set, Some("106")));
    assert!(tc.reason.contains("queue 3") && tc.evidence.contains("rails"), "{tc:?}");
    assert_eq!(fabric.profile.as_deref(), Some("rails"));
}

#[test]
fn a_profile_for_another_fabric_is_reported() {
    let text = "name: rails\nextends: infiniband\n";
    let why = with_profile("l40s-ethernet-only", "torch-required", text).unwrap_err();
    assert!(why.contains("no RDMA port is up") && why.contains("gpu-1"), "{why}");
}

#[test]
fn profiles_that_cannot_be_are_refused_with_the_field() {
    for (text, expected) in [
        (
            "name: x\nsettings: [{name: NCCL_IB_TCC, value: '1', reason: r, link: l}]",
            "settings[0].name: got `NCCL_IB_TCC`",
        ),
        ("name: x\nsettings: [{name: NCCL_IB_TC, value: high, reason: r, link: l}]", "settings[0].value: got `high`"),
        ("name: x\nsettings: [{name: LOCAL_RANK, value: '1', reason: r, link: l}]", "settings[0].name"),
        ("name: x\ncolour: red", "colour"),
        ("name: x\nextends: rocky", "extends: got `rocky`; expected aws-efa"),
        ("name: x\ntransport: Plugin", "plugin"),
        ("name: x\nresources: [{name: rdma/a}]", "resources[0]"),
        (
            "name: x\nsettings: [{name: A, value: b, reason: r, link: l}]\nleave: [{name: A, reason: r, link: l}]",
            "leave[0].name",
        ),
        ("", "profile"),
    ] {
        let error = Profile::parse(text).unwrap_err().to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
    let long =
        format!("name: x\nsettings: [{{name: NCCL_TOPO_FILE, value: {}, reason: r, link: l}}]", "x".repeat(1024));
    assert!(Profile::parse(&long).unwrap_err().to_string().contains("at most 1023 bytes"));
}

#[test]
fn every_pack_is_a_valid_profile_under_its_name() {
    let packs = switchyard_fabric::profile::packs();
    for pack in packs {
        assert!(pack.check().is_ok(), "{:?}", pack.check());
        assert!(pack.detect.is_some() && !pack.title.is_empty(), "{}", pack.name);
        assert!(pack.settings.iter().all(|setting| !setting.reason.is_empty() && setting.link.starts_with("https://")));
    }
    let mut names: Vec<&str> = packs.iter().map(|pack| pack.name.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), packs.len());
}
