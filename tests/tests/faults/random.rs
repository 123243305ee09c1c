//! G4, first half: API calls fail in a seeded random sequence.

use super::{base, kubelet, lanes, on_lanes};
use anyhow::{Context, Result, ensure};
use serde_json::json;
use switchyard_tests::chaos;
use switchyard_tests::faults::{Plan, RandomFaults, Scenario};

/// Failing calls per thousand. This exceeds any real failure rate, because a run makes few calls.
const PER_MILLE: u64 = 200;
/// Minimum number of faults per round of all scenarios, found by experience.
const PER_ROUND: usize = 40;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_api_faults_leave_nothing_stuck() -> Result<()> {
    let seed = chaos::seed().unwrap_or(20_261_121);
    let kubelet = kubelet("weather").await?;
    let base = base().await?;
    let wanted = chaos::size(150, 10_000);
    // A run spends most of its time waiting for retries.
    let lanes = lanes(&kubelet, "weather", chaos::size(6, 16)).await?;
    let rounds = wanted.div_ceil(PER_ROUND);
    let plays: Vec<Scenario> = (0..rounds).flat_map(|_| Scenario::ALL).collect();
    let played = on_lanes(lanes, plays, async |lane, number, scenario| {
        let (name, before) = (format!("w{number}"), (lane.proxy.faults(), lane.proxy.calls()));
        let seed = seed + number as u64;
        let ended = match lane.play(scenario, &name, Plan::RandomFaults(RandomFaults::new(seed, PER_MILLE))).await {
            Ok(()) => lane.expect_state(&name, &base[&scenario].state).await,
            Err(error) => Err(error),
        };
        ended.with_context(|| format!("{scenario:?}; reproduce with SWITCHYARD_SEED={seed}"))?;
        lane.clean_up(&name).await?;
        Ok((lane.proxy.faults() - before.0, lane.proxy.calls() - before.1))
    });
    let counts = played.await?;
    let plays = counts.len();
    let faults: u64 = counts.iter().map(|(faults, _)| faults).sum();
    let calls = counts.iter().map(|(_, calls)| calls).sum::<u64>() as f64 / plays as f64;
    let quiet = base.values().map(|quiet| quiet.calls).sum::<u64>() as f64 / base.len() as f64;
    ensure!(calls <= 3.0 * quiet, "{calls:.0} calls per run; {quiet:.0} without faults");
    chaos::report(
        "g4-api-weather",
        &json!({
            "seed": seed, "plays": plays, "faults": faults, "callsPerPlay": calls, "callsPerQuietPlay": quiet,
            "stuck": 0, "panics": 0,
        }),
    )?;
    ensure!(faults >= wanted as u64, "{faults} faults were injected; expected {wanted}");
    Ok(())
}
