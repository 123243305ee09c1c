//! Each fault row has a mutant that it must catch, because a check that cannot fail proves nothing.

use super::{Base, base, kubelet, views, zombies};
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::time::Duration;
use switchyard_tests::faults::{Fault, FaultPoint, Lane, Plan, RandomFaults, Scenario};
use switchyard_tests::{ControlPlane, ControllerOptions, Kubelet, chaos, mutants_program, start_controller};

/// Long enough for a job without the mutant, as the fault rows themselves prove.
const TIMEOUT: Duration = Duration::from_secs(15);

fn options(bug: &str) -> ControllerOptions {
    ControllerOptions {
        program: Some(mutants_program().to_path_buf()),
        environment: vec![("SWITCHYARD_MUTANT", bug.into())],
        ..ControllerOptions::default()
    }
}

async fn lane<'a>(kubelet: &'a Kubelet, bug: &str) -> Result<Lane<'a>> {
    let mut lane = Lane::new(ControlPlane::shared(), kubelet, bug, options(bug)).await?;
    lane.timeout = TIMEOUT;
    Ok(lane)
}

/// Runs crash points until one is a violation.
async fn catches_at(kubelet: &Kubelet, bug: &str, base: &Base, fault: Fault) -> Result<bool> {
    let lane = lane(kubelet, bug).await?;
    let scenario = Scenario::Create;
    for write in 1..=base[&scenario].writes {
        let point = FaultPoint { scenario, write, fault: fault.clone() };
        if lane.run_point(&point, &format!("p{write}"), &base[&scenario].state).await.is_err() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Runs all scenarios up to three times, until one has a different final state.
async fn catches(lane: &mut Lane<'_>, base: &Base, plan: impl Fn(usize) -> Plan) -> Result<bool> {
    for (number, scenario) in [Scenario::ALL; 3].into_iter().flatten().enumerate() {
        let name = format!("c{number}");
        let played = lane.play(scenario, &name, plan(number)).await;
        if played.is_err() || lane.expect_state(&name, &base[&scenario].state).await.is_err() {
            return Ok(true);
        }
        lane.clean_up(&name).await?;
    }
    Ok(false)
}

async fn two(kubelet: &Kubelet, bug: &str, base: &Base) -> Result<bool> {
    let mut lane = lane(kubelet, bug).await?;
    let own = ControllerOptions { namespace: Some(lane.jobs.namespace.clone()), ..options(bug) };
    let _second = start_controller(ControlPlane::shared(), &format!("{bug}-second"), &own)?;
    catches(&mut lane, base, |_| Plan::Quiet).await
}

async fn late(kubelet: &Kubelet, bug: &str, base: &Base) -> Result<bool> {
    let mut lane = lane(kubelet, bug).await?;
    let (delay, cut) = views::VIEWS[4];
    lane.proxy.set_events(Duration::from_millis(delay), cut);
    lane.restart()?;
    catches(&mut lane, base, |_| Plan::Quiet).await
}

async fn random_faults(kubelet: &Kubelet, bug: &str, base: &Base) -> Result<bool> {
    let mut lane = lane(kubelet, bug).await?;
    catches(&mut lane, base, |number| Plan::RandomFaults(RandomFaults::new(number as u64, 200))).await
}

/// Negative control: without a mutant, the same program passes each scenario.
async fn negative_control(kubelet: &Kubelet, base: &Base) -> Result<()> {
    let lane = lane(kubelet, "none").await?;
    for (number, scenario) in Scenario::ALL.into_iter().enumerate() {
        let name = format!("c{number}");
        lane.play(scenario, &name, Plan::Quiet).await.with_context(|| format!("{scenario:?}"))?;
        lane.expect_state(&name, &base[&scenario].state).await.with_context(|| format!("{scenario:?}"))?;
        lane.clean_up(&name).await?;
    }
    Ok(())
}

async fn zombie(bug: &str) -> Result<bool> {
    let kubelet = kubelet(bug).await?;
    let lane = lane(&kubelet, bug).await?;
    Ok(zombies::play(&kubelet, &lane, "z").await.is_err())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_row_catches_its_mutant() -> Result<()> {
    let kubelet = kubelet("mutants").await?;
    let base = base().await?;
    let rows = tokio::join!(
        // Kill before the write, because requests sent concurrently with a write that still
        // succeeds could be the rest of the gang.
        catches_at(&kubelet, "half-a-gang", base, Fault::KillBefore),
        catches_at(&kubelet, "another-name", base, Fault::DropReply),
        late(&kubelet, "ghosts", base),
        random_faults(&kubelet, "forgets", base),
        two(&kubelet, "name-is-taken", base),
        zombie("waits-for-zombies"),
        negative_control(&kubelet, base),
    );
    let caught = json!({
        "g1 half-a-gang": rows.0.context("G1")?, "g2 another-name": rows.1.context("G2")?,
        "g3 ghosts": rows.2.context("G3")?, "g4 forgets": rows.3.context("G4")?,
        "g5 name-is-taken": rows.4.context("G5")?, "g6 waits-for-zombies": rows.5.context("G6")?,
    });
    chaos::report("planted-bugs", &caught)?;
    rows.6.context("the program fails without a mutant")?;
    ensure!(caught.as_object().is_some_and(|rows| rows.values().all(|caught| *caught == true)), "{caught}");
    Ok(())
}
