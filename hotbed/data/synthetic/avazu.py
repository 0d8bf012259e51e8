"""The shape of the Avazu click log: 22 id columns, no integers, ten days, 17 % clicks.

Cardinalities are those published of the 40,428,967 train rows, 9,449,445 in all. Skew was fitted to the distinct-id growth and
the head shares of the real log's first hour. `top` is the one id that stands for "none" (no app on a site, no device id). The
hour is the clock of the log and carries no signal, since no model can know the hours of days to come.
"""

from __future__ import annotations

from hotbed.data.synthetic.shape import IdColumn, Shape

ID_COLUMNS = (
    IdColumn("hour", 240, 0.0, 0, clock=True),
    IdColumn("C1", 7, 8.00, 1.1),
    IdColumn("banner_pos", 7, 7.95, 0.05, top=0.8),
    IdColumn("site_id", 4737, 1.62, 0.25),
    IdColumn("site_domain", 7745, 1.72, 0.44),
    IdColumn("site_category", 26, 8.00, 7.1),
    IdColumn("app_id", 8552, 1.59, 2.8, top=0.782),
    IdColumn("app_domain", 559, 4.09, 4.3, top=0.83),
    IdColumn("app_category", 36, 5.75, 1.6),
    IdColumn("device_id", 2686408, 0.94, 1.2, top=0.873),
    IdColumn("device_ip", 6729486, 0.99, 15),
    IdColumn("device_model", 8251, 1.56, 12),
    IdColumn("device_type", 5, 8.00, 0.98),
    IdColumn("device_conn_type", 4, 5.60, 0.8),
    IdColumn("C14", 2626, 3.36, 30),
    IdColumn("C15", 8, 8.00, 0.45),
    IdColumn("C16", 9, 5.99, 0.05),
    IdColumn("C17", 435, 3.26, 12, top=0.392),
    IdColumn("C18", 4, 8.00, 5.1),
    IdColumn("C19", 68, 3.58, 2.4),
    IdColumn("C20", 172, 2.27, 4.2, top=0.62),
    IdColumn("C21", 60, 8.00, 14),
)

AVAZU = Shape(
    name="avazu-like",
    summary="click log of Avazu's shape: 22 id columns of 9.4 M ids, no numbers, 10 days, 17 % clicks",
    ids=ID_COLUMNS,
    integers=(),
    missing={},
    interacting=("C1", "banner_pos", "site_category", "app_category", "device_conn_type", "C16", "C18", "C19", "C21"),
    positive_rate=0.1698,
    rows_per_day=240_000,
    days=10,
    spread=(0.0, 1.22, 0.55),
    text="avazu",
    generation=1,
    salt=2,
    label="click",
)
