//! The best GPUs of a node for a pod of each size, in GB/s.

use super::devices::{GANG, NodeModel, gigabytes};
use crate::text::{Screen, Table};
use switchyard_core::placement::gpus::UNLIMITED;

/// For pods of 1, 2, 4, 8 and 16 GPUs, the set that placement would choose on this node if it were
/// empty.
pub(super) fn table(screen: &mut Screen, known: &NodeModel<'_>) {
    let Some(shape) = &known.shape else { return };
    let mut table = Table::new(&["BEST", "RING GB/s", "OUT GB/s", "GPUS"]);
    for gpus in [1_u8, 2, 4, 8, 16] {
        let Some(set) = shape.best_set(known.named.usable, gpus, Some(GANG)) else { continue };
        let ring = shape.ring[set as usize];
        let names: Vec<String> =
            shape.by_rail(set).iter().map(|gpu| known.status.gpus[usize::from(*gpu)].index.to_string()).collect();
        table.rows.push(vec![
            gpus.to_string(),
            if ring == UNLIMITED { "-".to_owned() } else { gigabytes(ring) },
            gigabytes(shape.outward(set, Some(GANG))),
            names.join(","),
        ]);
    }
    if table.rows.len() > 1 {
        screen.line("");
        screen.table(vec![table]);
    }
}
