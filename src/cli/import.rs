//! `switchyard topo import`: converts the output of `nvidia-smi topo -m` to a GPUTopology.

use crate::args::{Cli, ImportArgs};
use crate::failure::Failure;
use crate::input;
use crate::output::emit_object;
use switchyard_topology::import::{self, Imported, Options};
use switchyard_topology::matrix;
use switchyard_worker_contract::exit::Exit;

/// Reads the matrix and prints the machine.
pub(super) fn import(cli: &Cli, args: &ImportArgs) -> Result<Exit, Failure> {
    let imported = read(args)?;
    if !cli.quiet {
        for warning in &imported.warnings {
            anstream::eprintln!("warning: {warning}");
        }
    }
    emit_object(cli.output, &imported.topology);
    Ok(Exit::Done)
}

fn read(args: &ImportArgs) -> Result<Imported, Failure> {
    let name = input::name(&args.file);
    let text = input::read_object(&args.file, "matrix")?;
    let matrix = matrix::parse(&text).map_err(|faults| {
        Failure::usage(format!("{name} cannot be used as output of `nvidia-smi topo -m`\n{faults}"))
    })?;
    let options = Options { name: args.name.clone(), gpu_model: args.gpu_model.clone(), rates: args.nic_gbps.clone() };
    import::import(&matrix, &options).map_err(|error| Failure::usage(format!("{name}: {error}")))
}
