//! A Chrome trace (`chrome://tracing`, Perfetto) of selected steps of a rank.
//!
//! Each rank is a process in the trace, and each thread a row. Times use rank 0's clock, so that
//! the files of all ranks can be merged.

use super::replace;
use serde_json::{Value, json};
use std::io;
use std::path::Path;
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use switchyard_worker_contract::record;

/// A row of a rank's trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Row {
    /// Whole steps and their phases.
    Step,
    /// Layers, on the training thread.
    Compute,
    /// Another compute thread, counted from 1.
    Thread(u32),
    /// All-reduces of one communicator.
    Communicator(u32),
    /// Reading, decoding and augmenting on one thread.
    Reader(u32),
}

impl Row {
    fn id(self) -> u32 {
        match self {
            Row::Step => 0,
            Row::Compute => 1,
            Row::Communicator(index) => 1_000 + index,
            Row::Thread(index) => 10 + index,
            Row::Reader(index) => 2_000 + index,
        }
    }

    fn name(self) -> String {
        match self {
            Row::Step => "steps".into(),
            Row::Compute => "compute 0".into(),
            Row::Thread(index) => format!("compute {index}"),
            Row::Reader(index) => format!("reader {index}"),
            Row::Communicator(index) => format!("communicator {index}"),
        }
    }
}

/// Recorded operations of a rank.
pub struct Trace {
    rank: u32,
    /// One point in time on both clocks; the second in microseconds since 1970 on rank 0.
    origin: (Instant, f64),
    rows: std::collections::BTreeSet<Row>,
    events: Vec<Value>,
    /// Recording overhead in seconds.
    overhead: f64,
}

impl Trace {
    /// `clock_offset_us`: microseconds to add to this host's wall clock to get rank 0's.
    pub fn new(rank: u32, clock_offset_us: i64) -> Trace {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64() * 1e6);
        let origin = (Instant::now(), wall + clock_offset_us as f64);
        Trace { rank, origin, rows: Default::default(), events: Vec::new(), overhead: 0.0 }
    }

    /// Adds an operation. `arguments` must be a JSON object.
    pub fn add(&mut self, row: Row, name: &str, start: Instant, end: Instant, arguments: Value) {
        let begin = Instant::now();
        self.rows.insert(row);
        let since = start
            .checked_duration_since(self.origin.0)
            .map_or_else(|| -(self.origin.0.duration_since(start).as_secs_f64()), |later| later.as_secs_f64());
        self.events.push(json!({
            "ph": "X", "name": name, "pid": self.rank, "tid": row.id(),
            "ts": self.origin.1 + since * 1e6, "dur": end.duration_since(start).as_secs_f64() * 1e6, "args": arguments,
        }));
        self.overhead += begin.elapsed().as_secs_f64();
    }

    /// Writes this rank's file to the run directory.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(mut self, run_dir: &Path) -> io::Result<()> {
        let (pid, rank) = (self.rank, format!("rank {}", self.rank));
        let name = |what: &str, tid: u32, name: String| json!({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}});
        let mut events = vec![
            name("process_name", 0, rank),
            json!({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}),
        ];
        events.extend(self.rows.iter().map(|row| name("thread_name", row.id(), row.name())));
        events.append(&mut self.events);
        let trace = json!({
            "displayTimeUnit": "ms", "traceEvents": events,
            "otherData": {"rank": pid, "recordingMilliseconds": self.overhead * 1e3},
        });
        replace(run_dir, &record::trace_file(self.rank), &trace)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::time::Duration;

    #[test]
    fn a_trace_has_named_rows_and_times_on_the_common_clock() {
        let folder = tempfile::tempdir().unwrap();
        let mut trace = Trace::new(2, 5_000_000);
        let start = Instant::now();
        trace.add(Row::Compute, "fc forward", start, start + Duration::from_millis(3), json!({"kind": "Linear"}));
        trace.add(Row::Communicator(1), "bucket 0", start, start + Duration::from_millis(1), json!({}));
        trace.write(folder.path()).unwrap();
        let text = fs::read(folder.path().join("record/rank-2.trace.json")).unwrap();
        let read: Value = serde_json::from_slice(&text).unwrap();
        let events = read["traceEvents"].as_array().unwrap();
        let rows: Vec<&str> =
            events.iter().filter(|e| e["name"] == "thread_name").filter_map(|e| e["args"]["name"].as_str()).collect();
        assert_eq!(rows, ["compute 0", "communicator 1"]);
        let operation = events.iter().find(|event| event["name"] == "fc forward").unwrap();
        assert_eq!((operation["pid"].as_u64(), operation["tid"].as_u64()), (Some(2), Some(1)));
        assert!((operation["dur"].as_f64().unwrap() - 3_000.0).abs() < 1.0);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64() * 1e6;
        assert!((operation["ts"].as_f64().unwrap() - now - 5e6).abs() < 2e6);
    }
}
