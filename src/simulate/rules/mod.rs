//! Rules that answer the same events: the product's, and those of peers, from their documentation. All get gangs as a whole; without that, half
//! gangs block each other for ever, which says nothing.

mod peer;
mod pool;
mod product;

pub use peer::{Order, Peer, Places};
pub use pool::{Pool, PoolOrder};
pub use product::Product;
