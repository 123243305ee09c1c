//! The best GPUs of a node for a pod of each size, in GB/s.

use super::super::units::three_digits;
use super::text::{Screen, Table};
use crate::placement::gpus::{Level, MOST_GPUS, Shape, UNLIMITED};
use crate::topology::report;
use switchyard_crds::gpu_topology::GPUTopologyStatus;

/// One of several equal nodes: what leaves the node counts.
const GANG: Level = Level { share: 1000, nvlink: false };

/// For 1, 2, 4, 8 and 16 GPUs the set that placement would choose on this node if it were empty.
pub(super) fn table(screen: &mut Screen, status: &GPUTopologyStatus) {
    let named = match report::devices(status) {
        Ok(named) if named.devices.gpus.len() <= MOST_GPUS => named,
        Ok(_) => return,
        Err(contradiction) => return screen.paragraph("no sets", &contradiction.to_string()),
    };
    let shape = Shape::new(&named.devices);
    let rate = |megabytes: u32| three_digits(f64::from(megabytes) / 1000.0);
    let mut table = Table::new(&["BEST", "RING GB/s", "OUT GB/s", "GPUS"]);
    for gpus in [1_u8, 2, 4, 8, 16] {
        let Some(set) = shape.best_set(named.usable, gpus, Some(GANG)) else { continue };
        let ring = shape.ring[set as usize];
        let names: Vec<String> =
            shape.by_rail(set).iter().map(|gpu| status.gpus[usize::from(*gpu)].index.to_string()).collect();
        table.rows.push(vec![
            gpus.to_string(),
            if ring == UNLIMITED { "-".to_owned() } else { rate(ring) },
            rate(shape.outward(set, Some(GANG))),
            names.join(","),
        ]);
    }
    if table.rows.len() > 1 {
        screen.line("");
        screen.table(vec![table]);
    }
}
