package client

var Backoff = backoff
