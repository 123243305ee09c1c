//! Gangs with resource claims.

use super::{Allocation, RACK, Scene, h200, names, placement, until};
use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::ResourceQuota;
use k8s_openapi::api::rbac::v1::ClusterRole;
use k8s_openapi::api::resource::v1alpha3::DeviceTaintRule;
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use switchyard_crds::gpu_topology::{Fabric, FabricState};
use switchyard_crds::{Limit, TrainJob};
use switchyard_plan::resources;
use switchyard_tests::gpus::{DRIVER, MACHINES, uuids};
use switchyard_tests::history::{Fact, Recorder};
use switchyard_tests::placement::{bandwidth, best_pod};
use switchyard_tests::{Command, account, chart_rules, condition_of, merge, plain_job, role, stage_of, template_on};
use switchyard_topology::report;

/// Planned GPUs of each claim of a job's current attempt.
fn planned(job: &TrainJob) -> BTreeMap<String, BTreeSet<String>> {
    let attempt = job.status.as_ref().and_then(|status| status.attempt).unwrap();
    let set = |(rank, gpus): (usize, &Vec<String>)| {
        (format!("{}-{attempt}-{rank}", job.name_any()), gpus.iter().cloned().collect())
    };
    placement(job).nodes.iter().map(|node| &node.gpus).enumerate().map(set).collect()
}

#[tokio::test]
async fn a_gang_gets_exactly_the_gpus_of_its_plan() -> Result<()> {
    let scene = Scene::new(Allocation::Claims, "exact", &[(h200(), "r1"), (h200(), "r1"), (h200(), "r2")]).await?;
    let recorder = Recorder::start(scene.plane.client().await?).await?;
    let job = scene.run("a", 2, 4, json!({"failurePolicy": {"maxRestarts": 1}})).await?;
    let status = job.status.clone().unwrap();
    assert_eq!(status.device_allocation, Some(switchyard_crds::DeviceAllocation::Claims));
    assert_eq!(names(&job), scene.nodes[..2], "the two of one rack");
    let place = placement(&job);
    // The four GPUs with a dedicated NIC each: 4 x 48 GB/s of payload leave the node.
    let figure = |amount: &Option<k8s_openapi::apimachinery::pkg::api::resource::Quantity>| amount.clone().unwrap().0;
    assert_eq!((figure(&place.predicted_bus_bandwidth), figure(&place.best_possible)), ("192G".into(), "192G".into()));
    assert_eq!(place.limited_by, Some(Limit::NICs));
    assert!(place.reason.starts_with(&format!("8 ranks on 2 nodes x 4 GPUs in {RACK} r1; ")), "{}", place.reason);
    for (node, report) in place.nodes.iter().zip(&scene.reports) {
        let all = uuids(report);
        assert_eq!((node.gpus.len(), node.shape.nics.len()), (4, 4), "{node:?}");
        assert!(node.gpus.iter().all(|gpu| all.contains(gpu)) && !node.shape.numa_nodes.is_empty(), "{node:?}");
    }
    assert_eq!(scene.gpus.allocated(&scene.jobs.namespace).await?, planned(&job));
    let pods = serde_json::to_string(&scene.jobs.pods().await?)?;
    assert!(!pods.contains("NVIDIA_VISIBLE_DEVICES") && !pods.contains("nvidia.com/gpu"), "{pods}");

    // Required order: placement, all claims, gates.
    let history = recorder.history().await?;
    let (mut decided, mut claims, mut lifted) = (0, Vec::new(), Vec::new());
    let uid = job.uid().unwrap();
    history.walk(|before, _, change| match (before, &change.fact) {
        (_, Fact::Job(now)) if change.uid == uid && now.is("Placed") && decided == 0 => decided = change.revision,
        (None, Fact::Claim(claim)) if claim.job == uid => claims.push(change.revision),
        (Some(Fact::Pod(was)), Fact::Pod(now)) if now.job == uid && was.view.gated && !now.view.gated => {
            lifted.push(change.revision);
        }
        _ => {}
    });
    assert_eq!((claims.len(), lifted.len()), (2, 2));
    assert!(0 < decided && decided < claims[0] && claims[1] < lifted[0], "{decided} {claims:?} {lifted:?}");

    // The claims of an attempt are deleted with it, and the next attempt gets the same GPUs.
    scene.kubelet.send(&scene.jobs.namespace, "a-1-1", Command::Exit(3, String::new()))?;
    let is_second =
        |job: &TrainJob| stage_of(job) == Some("Running") && job.status.as_ref().unwrap().attempt == Some(2);
    let restarted = scene.jobs.wait("a", "in attempt 2", is_second).await?;
    assert_eq!(placement(&restarted).nodes, place.nodes);
    let only_new = async || anyhow::Ok(scene.gpus.allocated(&scene.jobs.namespace).await? == planned(&restarted));
    until("only claims of attempt 2", only_new).await?;
    scene.finish("a").await?;
    until("no claims", async || Ok(scene.gpus.allocated(&scene.jobs.namespace).await?.is_empty())).await?;
    scene.had_all_rights()
}

/// On every machine type, the allocated GPUs match the brute-force optimum, with its predicted
/// bandwidth.
#[tokio::test]
async fn every_machine_type_allocates_its_best_gpus() -> Result<()> {
    // Sets of 16 GPUs are too large for enumerating rings by permutation.
    let machines: Vec<_> = MACHINES.into_iter().filter(|machine| machine.fixture != "f12-dgx-2").collect();
    let kinds: Vec<_> = machines.iter().map(|machine| (*machine, "")).collect();
    let scene = Scene::new(Allocation::Claims, "kinds", &kinds).await?;
    let mut sizes = BTreeMap::new();
    for (number, node) in scene.nodes.iter().enumerate() {
        let named = report::devices(scene.reports[number].status.as_ref().unwrap())?;
        let gpus = named.devices.gpus.len().min(4) as u32;
        let on = switchyard_tests::template_on(std::slice::from_ref(node));
        scene.create(&format!("k{number}"), 1, gpus, "run", json!({"template": on})).await?;
        sizes.insert(number, (gpus, named.devices));
    }
    for (number, (gpus, devices)) in &sizes {
        let job = scene.jobs.wait_stage(&format!("k{number}"), "Running").await?;
        let all = uuids(&scene.reports[*number]);
        let mut set: Vec<usize> = placement(&job).nodes[0]
            .gpus
            .iter()
            .map(|gpu| all.iter().position(|other| other == gpu).unwrap())
            .collect();
        set.sort_unstable();
        let system = switchyard_core::placement::gpus::MinLink::System;
        let value = bandwidth(devices, &set, None, system);
        let max = best_pod(devices, (1 << devices.gpus.len()) - 1, *gpus as u8, None, system);
        assert_eq!(value, max, "{}: {}", kinds[*number].0.fixture, placement(&job).reason);
        let reported = placement(&job).predicted_bus_bandwidth.clone().unwrap();
        let reported = resources::of_quantities(&[("rate".to_string(), reported)].into()).get("rate");
        assert_eq!(Some(reported), value.map(|value| i64::from(value) * 1_000_000_000), "{}", kinds[*number].0.fixture);
    }
    scene.had_all_rights()
}

/// Trays of one NVLink domain are close to each other, but NVLink outperforms their NICs only with
/// an IMEX channel.
#[tokio::test]
async fn trays_of_a_clique_are_allocated_together() -> Result<()> {
    let gb200 = switchyard_tests::gpus::Machine::of("f06-gb200");
    let scene = Scene::new(Allocation::Claims, "clique", &[(gb200, ""); 4]).await?;
    for (number, report) in scene.reports.iter().enumerate() {
        let mut report = report.clone();
        let cluster = "7b9f63a1-3d3b-4f61-9f5c-0d9a2f9b6c11".to_string();
        // The first and last node share a clique, so that names do not decide.
        let clique = u32::from(number == 0 || number == 3);
        report.status.as_mut().unwrap().fabric = Some(Fabric {
            state: FabricState::Completed,
            result: Some("Success".into()),
            cluster_uuid: Some(cluster),
            clique_id: Some(clique),
            health: None,
        });
        scene.gpus.report(&report).await?;
    }
    scene.run("first", 1, 4, json!({"template": switchyard_tests::template_on(&scene.nodes[1..2])})).await?;
    let job = scene.run("a", 2, 4, json!({})).await?;
    assert_eq!(names(&job), [scene.nodes[0].as_str(), scene.nodes[3].as_str()], "{}", placement(&job).reason);
    assert!(placement(&job).reason.contains("in nvidia.com/gpu.clique 7b9f63a1"), "{}", placement(&job).reason);
    assert_eq!(placement(&job).limited_by, Some(Limit::NICs), "{}", placement(&job).reason);
    assert!(
        placement(&job).reason.contains("the pods claim no channel of a ComputeDomain"),
        "{}",
        placement(&job).reason
    );
    scene.had_all_rights()
}

/// Another claim takes a GPU after it was planned and before our claim is created. Withholding the
/// controller's right to create claims forces this order every time.
#[tokio::test]
async fn a_gang_that_loses_a_gpu_is_placed_elsewhere_as_a_whole() -> Result<()> {
    let plane = &Allocation::Claims.plane().0;
    let is_claim = |rule: &k8s_openapi::api::rbac::v1::PolicyRule| {
        rule.verbs == ["create"] && rule.resources.as_deref() == Some(&["resourceclaims".to_string()])
    };
    let (none, all): (Vec<_>, Vec<_>) =
        (chart_rules()?.into_iter().filter(|rule| !is_claim(rule)).collect(), chart_rules()?);
    let kubeconfig = account(plane, "devices-overtaken", &none)?;
    let kinds = [(h200(), "r1"), (h200(), "r1"), (h200(), "r2"), (h200(), "r2")];
    let scene = Scene::with(Allocation::Claims, "overtaken", &kinds, kubeconfig).await?;
    scene.create("a", 2, 8, "run", json!({})).await?;
    let placed = scene.jobs.wait("a", "placed", |job| condition_of(job, "Placed").is_some_and(|c| c.status == "True"));
    let first = placed.await?;
    assert_eq!(names(&first), scene.nodes[..2]);
    let wanted = placement(&first).nodes[1].gpus[5].clone();
    scene.gpus.occupy(&scene.jobs.namespace, "stranger", &scene.nodes[1], &[wanted]).await?;
    let roles = Api::<ClusterRole>::all(scene.jobs.client.clone());
    let params = PatchParams::apply("test").force();
    roles.patch("devices-overtaken", &params, &Patch::Apply(role("devices-overtaken", &all))).await?;
    let is_restarted = |job: &TrainJob| stage_of(job) == Some("Running");
    let restarted = scene.jobs.wait("a", "running elsewhere", is_restarted).await?;
    assert_eq!(names(&restarted), scene.nodes[2..], "{}", placement(&restarted).reason);
    assert_eq!(restarted.status.as_ref().unwrap().restarts.as_ref().unwrap().total, 0, "it never ran before");
    let reported = scene.jobs.events("a", "GangRolledBack").await?;
    assert!(reported.iter().any(|note| note.contains("the scheduler refuses 1 of 2 pods")), "{reported:?}");
    let mine = scene.gpus.allocated(&scene.jobs.namespace).await?;
    let expected = planned(&restarted);
    assert!(expected.iter().all(|(claim, gpus)| mine.get(claim) == Some(gpus)), "{mine:?}");
    let log = std::fs::read_to_string(&scene.controller.log)?.replace('\\', "");
    assert!(log.contains("cannot create resource \"resourceclaims\""), "the missing right is named: {log}");
    Ok(())
}

/// A job's nodes and GPUs by rank.
fn allocated_devices(job: &TrainJob) -> Vec<(&str, &[String])> {
    placement(job).nodes.iter().map(|node| (node.node_name.as_str(), node.gpus.as_slice())).collect()
}

#[tokio::test]
async fn a_lost_node_is_replaced_and_the_others_stay() -> Result<()> {
    let scene = Scene::new(Allocation::Claims, "repair", &[(h200(), "r1"); 6]).await?;
    let first = scene.run("a", 4, 4, json!({})).await?;
    // The GPUs that a new plan would take first.
    let lost = names(&first)[1].to_string();
    scene.kubelet.lose_node(&lost).await?;
    let is_second =
        |job: &TrainJob| stage_of(job) == Some("Running") && job.status.as_ref().unwrap().attempt == Some(2);
    let second = scene.jobs.wait("a", "in attempt 2", is_second).await?;
    let (before, after) = (allocated_devices(&first), allocated_devices(&second));
    assert_eq!(
        (before[0], before[2], before[3]),
        (after[0], after[2], after[3]),
        "nodes, GPUs and ranks are unchanged"
    );
    ensure!(after[1].0 != lost && before.iter().all(|(node, _)| *node != after[1].0), "{after:?}");
    assert_eq!(second.status.as_ref().unwrap().restarts.as_ref().context("restarts")?.infrastructure, 1);
    let mine = scene.gpus.allocated(&scene.jobs.namespace).await?;
    assert!(planned(&second).iter().all(|(claim, gpus)| mine.get(claim) == Some(gpus)), "{mine:?}");
    scene.had_all_rights()
}

/// Otherwise its claims would keep their devices until Kubernetes notices that their pods are gone.
#[tokio::test]
async fn a_suspended_job_holds_no_claims() -> Result<()> {
    let scene = Scene::new(Allocation::Claims, "suspended", &[(h200(), "")]).await?;
    scene.run("a", 1, 8, json!({})).await?;
    scene.jobs.patch("a", json!({"spec": {"suspend": true}})).await?;
    until("no claims", async || Ok(scene.gpus.allocated(&scene.jobs.namespace).await?.is_empty())).await?;
    scene.jobs.wait_stage("a", "Suspended").await?;
    scene.jobs.patch("a", json!({"spec": {"suspend": false}})).await?;
    let restarted = scene.jobs.wait_stage("a", "Running").await?;
    assert_eq!(scene.gpus.allocated(&scene.jobs.namespace).await?, planned(&restarted));
    scene.had_all_rights()
}

/// Regression: an administrator drained a node's GPUs with a DeviceTaintRule. Gangs were placed
/// there, the scheduler refused them, and they requeued. Also for rules that select by DeviceClass
/// and CEL, which were ignored.
#[tokio::test]
async fn a_gang_waits_while_a_rule_taints_the_devices_of_its_node() -> Result<()> {
    let scene = Scene::new(Allocation::Claims, "rule", &[(h200(), "")]).await?;
    scene.run("job-0", 1, 8, json!({})).await?;
    let rules = Api::<DeviceTaintRule>::all(scene.jobs.client.clone());
    let taint = async |selector: Value| {
        let taint = json!({"key": "example.com/drained", "effect": "NoSchedule"});
        let spec = json!({"deviceSelector": selector, "taint": taint});
        let rule = json!({"metadata": {"name": scene.nodes[0]}, "spec": spec});
        anyhow::Ok(rules.create(&Default::default(), &serde_json::from_value(rule)?).await?)
    };
    let by_uuid = |uuids: &[String]| {
        let expression = format!(r#"device.attributes["{DRIVER}"].?uuid.orValue("") in {}"#, json!(uuids));
        json!({"deviceClassName": DRIVER, "selectors": [{"cel": {"expression": expression}}]})
    };
    let selectors = [json!({"pool": scene.nodes[0]}), by_uuid(&uuids(&scene.reports[0])[..1])];
    for (number, selector) in selectors.into_iter().enumerate() {
        taint(selector).await?;
        let (first, second) = (format!("job-{number}"), format!("job-{}", number + 1));
        scene.create(&second, 1, 8, "run", json!({})).await?;
        scene.wait_message(&second, "most free GPUs on the others: 0").await?;
        scene.finish(&first).await?;
        // By the time this job has run, the controller has planned the queue again.
        let last = format!("last-{number}");
        let mut job = plain_job(&last, 1, "succeed-after=0.1s");
        merge(&mut job["spec"], json!({"template": template_on(&scene.nodes)}));
        scene.jobs.create(job).await?;
        scene.jobs.wait_stage(&last, "Complete").await?;
        let free = if number == 0 { 0 } else { 7 };
        let waiting = scene.wait_message(&second, &format!("most free GPUs on the others: {free}")).await?;
        assert!(waiting.status.as_ref().unwrap().placement.is_none());
        rules.delete(&scene.nodes[0], &Default::default()).await?;
        let runs = scene.jobs.wait_stage(&second, "Running").await?;
        assert_eq!(runs.status.as_ref().unwrap().attempt, Some(1));
    }
    // The scheduler agrees that these rules taint nothing.
    let missing = json!({"deviceClassName": "missing"});
    for (number, selector) in [missing, by_uuid(&["GPU-of-nobody".into()])].into_iter().enumerate() {
        taint(selector).await?;
        scene.finish(&format!("job-{}", number + 2)).await?;
        let runs = scene.run(&format!("job-{}", number + 3), 1, 8, json!({})).await?;
        assert_eq!(runs.status.as_ref().unwrap().attempt, Some(1));
        rules.delete(&scene.nodes[0], &Default::default()).await?;
    }
    scene.had_all_rights()
}

/// Regression: a gang whose claims exceeded its tenant's quota held 16 GPUs for a day, and no other
/// job could use them.
#[tokio::test]
async fn a_gang_over_its_claim_quota_releases_its_nodes() -> Result<()> {
    let scene = Scene::new(Allocation::Claims, "quota", &[(h200(), ""), (h200(), "")]).await?;
    let quotas = Api::<ResourceQuota>::namespaced(scene.jobs.client.clone(), &scene.jobs.namespace);
    let hard = json!({"count/resourceclaims.resource.k8s.io": "1"});
    let quota = json!({"metadata": {"name": "small"}, "spec": {"hard": hard}});
    quotas.create(&Default::default(), &serde_json::from_value(quota)?).await?;
    let counted =
        |quota: Option<&ResourceQuota>| quota.and_then(|quota| quota.status.as_ref()?.used.as_ref()).is_some();
    kube::runtime::wait::await_condition(quotas, "small", counted).await?;
    scene.create("a", 2, 8, "run", json!({"gangPolicy": {"scheduleTimeoutSeconds": 86_400}})).await?;
    let is_placed = |job: &TrainJob| condition_of(job, "Placed").is_some_and(|placed| placed.status == "True");
    scene.jobs.wait("a", "placed", is_placed).await?;
    scene.run("b", 1, 8, json!({})).await?;
    let a = scene.jobs.api().get("a").await?;
    let refused = condition_of(&a, "ObjectsRefused").context("ObjectsRefused")?;
    assert!(refused.status == "True" && refused.message.contains("exceeded quota: small"), "{refused:?}");
    let notes = scene.jobs.events("a", "GangRolledBack").await?;
    assert!(notes.iter().any(|note| note.contains("exceeded quota: small")), "{notes:?}");
    Ok(())
}
