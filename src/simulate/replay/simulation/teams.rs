//! Accounts for each team's demand, usage and fair share.

use crate::replay::{Job, Team};
use crate::trace::Row;
use std::collections::BTreeMap;

/// GPUs that a team's jobs request, and the allocated part of them.
#[derive(Default)]
struct Demand {
    all: u32,
    has: u32,
}

pub(super) struct Teams {
    pub of_job: Vec<usize>,
    pub usage: Vec<Team>,
    demands: Vec<Demand>,
}

impl Teams {
    /// A trace without queues has one team.
    pub fn of(rows: &[Row]) -> Teams {
        let mut numbers: BTreeMap<&str, usize> = BTreeMap::new();
        let mut usage: Vec<Team> = Vec::new();
        let of_job = rows.iter().map(|row| {
            *numbers.entry(row.queue.as_str()).or_insert_with(|| {
                usage.push(Team { name: row.queue.clone(), ..Team::default() });
                usage.len() - 1
            })
        });
        let of_job = of_job.collect();
        let demands = usage.iter().map(|_| Demand::default()).collect();
        Teams { of_job, usage, demands }
    }

    pub fn request(&mut self, job: &Job) {
        self.demands[job.team].all += job.all_gpus();
    }

    pub fn allocate(&mut self, job: &Job) {
        self.demands[job.team].has += job.all_gpus();
    }

    /// A job ended, or is about to be queued again.
    pub fn release(&mut self, job: &Job) {
        let demand = &mut self.demands[job.team];
        (demand.all, demand.has) = (demand.all - job.all_gpus(), demand.has - job.all_gpus());
    }

    /// Divides the GPUs max-min fairly: GPUs that a team does not need go to the others.
    pub fn advance(&mut self, seconds: f64, gpus: u32) {
        let mut open: Vec<usize> = (0..self.usage.len()).filter(|team| self.demands[*team].all > 0).collect();
        open.sort_by_key(|team| self.demands[*team].all);
        let mut left = f64::from(gpus);
        for (at, team) in open.iter().enumerate() {
            let (demand, team) = (&self.demands[*team], &mut self.usage[*team]);
            let part = f64::from(demand.all).min(left / (open.len() - at) as f64);
            left -= part;
            team.fair_share += seconds * part;
            team.used += seconds * f64::from(demand.has);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fair_share_is_the_demand_up_to_an_equal_part_of_the_rest() {
        let row = |queue: &str| {
            let (line, submit, duration, gpus, limit) = (2, 0.0, 1.0, 1, None);
            Row { line, submit, duration, gpus, queue: queue.into(), limit, preemptible: None }
        };
        let mut teams = Teams::of(&["a", "b", "c", "a"].map(row));
        assert_eq!(teams.of_job, [0, 1, 2, 0]);
        let job = |team, gpus| Job {
            number: 0,
            submit: 0.0,
            pods: 1,
            gpus,
            limit: None,
            team,
            is_urgent: false,
            saves: false,
            checkpoint: None,
        };
        for (team, gpus) in [(0, 90), (1, 10), (2, 60)] {
            teams.request(&job(team, gpus));
        }
        teams.allocate(&job(0, 90));
        teams.advance(2.0, 100);
        let got: Vec<(f64, f64)> = teams.usage.iter().map(|team| (team.used, team.fair_share)).collect();
        assert_eq!(got, [(180.0, 90.0), (0.0, 20.0), (0.0, 90.0)]);
    }
}
