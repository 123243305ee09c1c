//! Prints the table and writes the result file.

use super::Outcome;
use super::machine::Machine;
use super::ours::Memory;
use serde_json::{Value, json};
use std::fmt;
use std::path::Path;
use switchyard_worker::cpu::Format;

/// Times of one side in milliseconds.
pub struct Side {
    pub name: &'static str,
    /// Fastest step of each round.
    least: Vec<f64>,
    /// Median step of each round.
    medians: Vec<f64>,
    /// Lowest CPU time of a step in each round, over all threads.
    cpu: Vec<f64>,
}

fn median(numbers: &[f64]) -> f64 {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 }
}

fn least(numbers: &[f64]) -> f64 {
    numbers.iter().fold(f64::INFINITY, |a, &b| a.min(b))
}

impl Side {
    pub fn new(name: &'static str) -> Side {
        Side { name, least: Vec::new(), medians: Vec::new(), cpu: Vec::new() }
    }

    /// Adds a round: wall-clock and CPU times.
    pub fn add(&mut self, steps: &[[f64; 2]]) {
        let times: Vec<f64> = steps.iter().map(|step| step[0]).collect();
        self.least.push(least(&times));
        self.medians.push(median(&times));
        self.cpu.push(steps.iter().fold(f64::INFINITY, |a, step| a.min(step[1])));
    }

    /// The reported time.
    pub fn time(&self) -> f64 {
        median(&self.least)
    }

    /// Largest over smallest time of the rounds, minus 1.
    pub fn spread(&self) -> f64 {
        self.least.iter().fold(0.0, |a: f64, &b| a.max(b)) / least(&self.least) - 1.0
    }

    fn json(&self) -> Value {
        json!({
            "side": self.name, "milliseconds": self.time(), "spread": self.spread(), "leastOfRounds": self.least,
            "mediansOfRounds": self.medians, "cpuMilliseconds": least(&self.cpu),
        })
    }
}

/// Results of a case.
pub struct Row {
    pub case: &'static str,
    pub format: Format,
    pub threads: usize,
    pub parameters: usize,
    /// Our side, then the peers.
    pub sides: Vec<Side>,
    pub first_loss: f64,
    /// Largest difference between our losses and the peers' in the first steps.
    pub loss_difference: Option<f64>,
    /// Largest difference between the losses of the two peers.
    pub torch_difference: Option<f64>,
    pub memory: Memory,
    pub torch: Option<Value>,
}

impl Row {
    fn precision(&self) -> &'static str {
        if self.format == Format::F32 { "f32" } else { "bf16" }
    }

    /// Our time over the faster peer's.
    fn ratio(&self) -> Option<f64> {
        let best = self.sides[1..].iter().map(Side::time).min_by(f64::total_cmp)?;
        Some(self.sides[0].time() / best)
    }

    /// The same ratio for the lowest CPU time. Single-threaded only, because several threads spin
    /// while they wait for each other.
    fn cpu_ratio(&self) -> Option<f64> {
        let best = self.sides[1..].iter().map(|side| least(&side.cpu)).min_by(f64::total_cmp)?;
        (self.threads == 1).then(|| least(&self.sides[0].cpu) / best)
    }

    fn memory_ratio(&self) -> f64 {
        self.memory.total() as f64 / self.memory.in_f32 as f64
    }

    fn json(&self) -> Value {
        json!({
            "case": self.case, "precision": self.precision(), "threads": self.threads, "parameters": self.parameters,
            "sides": self.sides.iter().map(Side::json).collect::<Vec<_>>(),
            "ratio": self.ratio(), "cpuRatio": self.cpu_ratio(), "firstLoss": self.first_loss,
            "lossDifference": self.loss_difference,
            "torchDifference": self.torch_difference,
            "bytes": {
                "activations": self.memory.activations, "weights": self.memory.weights, "allInF32": self.memory.in_f32,
                "ratio": self.memory_ratio(),
            },
            "torch": self.torch,
        })
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:8} {:4} {} thread(s):", self.case, self.precision(), self.threads)?;
        for side in &self.sides {
            let spread = 100.0 * side.spread();
            write!(f, "  {} {:.1} ms +{spread:.0} % (CPU {:.1})", side.name, side.time(), least(&side.cpu))?;
        }
        if let Some(ratio) = self.ratio() {
            write!(f, "  ratio {ratio:.2}")?;
        }
        if let Some(ratio) = self.cpu_ratio() {
            write!(f, " (CPU {ratio:.2})")?;
        }
        if let (Some(ours), Some(theirs)) = (self.loss_difference, self.torch_difference) {
            write!(f, "  loss within {ours:.1e} (torch's forms {theirs:.1e})")?;
        }
        let mebibytes = self.memory.total() as f64 / 1_048_576.0;
        write!(f, "  memory {mebibytes:.0} MiB ({:.0} % of f32)", 100.0 * self.memory_ratio())
    }
}

/// Writes the result file.
pub fn write(file: &Path, rows: &[Row], before: &Machine, after: &Machine, rounds: usize, steps: usize) -> Outcome<()> {
    let command = if before.is_limited() { "cargo xtask bench engine-avx2" } else { "cargo xtask bench engine" };
    let document = json!({
        "command": command, "machine": before.json(), "noiseAfter": after.json(), "rounds": rounds,
        "stepsPerRound": steps, "rows": rows.iter().map(Row::json).collect::<Vec<_>>(),
    });
    Ok(std::fs::write(file, serde_json::to_string_pretty(&document)? + "\n")?)
}
