//! G1 and G2: every controller write is a point where the controller can die or the reply can be
//! lost.

use super::{Base, base, kubelet, lanes, on_lanes};
use anyhow::{Result, ensure};
use serde_json::json;
use switchyard_tests::chaos;
use switchyard_tests::faults::{Fault, FaultPoint, Scenario};

/// The full set combines each write with each fault. CI runs a part of it. All scenarios create
/// their job with the same writes, and each of these meets all faults in one scenario. Of the later
/// writes, each meets one of two faults alternately, or every second one meets a single fault.
fn points(base: &Base, faults: &[Fault]) -> Vec<FaultPoint> {
    let creation = base[&Scenario::Create].writes;
    let mut points = Vec::new();
    for (number, scenario) in (0..).zip(Scenario::ALL) {
        for write in 1..=base[&scenario].writes {
            let is_selected = |index: u64| {
                if write <= creation {
                    write % Scenario::ALL.len() as u64 == number
                } else {
                    (write + index).is_multiple_of(2)
                }
            };
            let selected = (0..).zip(faults).filter(|(index, _)| chaos::is_full() || is_selected(*index));
            points.extend(selected.map(|(_, fault)| FaultPoint { scenario, write, fault: fault.clone() }));
        }
    }
    points
}

/// Runs all points; returns their number, and at how many the fault was reached. A run can have
/// fewer writes than the one without faults, because changes that are seen together are written
/// together.
async fn play_all(prefix: &str, faults: &[Fault]) -> Result<(usize, usize)> {
    let kubelet = kubelet(prefix).await?;
    let base = base().await?;
    let points = points(base, faults);
    let count = points.len();
    let lanes = lanes(&kubelet, prefix, 4).await?;
    let injected = on_lanes(lanes, points, async |lane, number, point| {
        lane.run_point(&point, &format!("p{number}"), &base[&point.scenario].state).await
    });
    Ok((count, injected.await?.into_iter().filter(|injected| *injected).count()))
}

/// G1: the controller dies before and after each of its writes, in eight scenarios.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crash_points_have_the_same_final_state() -> Result<()> {
    let (points, reached) = play_all("crash", &[Fault::KillBefore, Fault::KillAfter]).await?;
    chaos::report("g1-crash-points", &json!({"points": points, "reached": reached, "violations": 0}))?;
    let wanted = chaos::size(80, 400);
    ensure!(reached >= wanted, "{reached} crash points were reached; expected {wanted}");
    Ok(())
}

/// G2: a write succeeds and its reply is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_replies_have_no_double_effect() -> Result<()> {
    let (points, reached) = play_all("reply", &[Fault::DropReply]).await?;
    chaos::report("g2-lost-replies", &json!({"points": points, "reached": reached, "violations": 0}))?;
    let wanted = chaos::size(38, 200);
    ensure!(reached >= wanted, "{reached} replies were lost; expected {wanted}");
    Ok(())
}
