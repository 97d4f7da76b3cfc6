"""What stands between transformers' attention calls and ops/anchor: masks, calls, settings, reports."""
