package main

import (
	"context"
	"net"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// latency is what a network adds to a round trip: half of it on the way to the server, half on the way back.
type latency time.Duration

// dial connects to a server through a proxy in this process. Closing either end closes the other.
func (l latency) dial(ctx context.Context, network, address string) (net.Conn, error) {
	server, err := new(net.Dialer).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	client, near := net.Pipe()
	go carry(near, server, time.Duration(l/2))
	go carry(server, near, time.Duration(l/2))
	return client, nil
}

// carry writes what it reads so much later. Pieces wait in a queue, so none delays those behind it.
func carry(from, to net.Conn, delay time.Duration) {
	type piece struct {
		bytes []byte
		due   time.Time
	}
	pieces := make(chan piece, 1024)
	go func() {
		defer to.Close()
		for p := range pieces {
			sleepUntil(p.due)
			if _, err := to.Write(p.bytes); err != nil {
				from.Close()
			}
		}
	}()
	defer close(pieces)
	buffer := make([]byte, 32<<10)
	for {
		n, err := from.Read(buffer)
		if err != nil {
			return
		}
		pieces <- piece{slices.Clone(buffer[:n]), time.Now().Add(delay)}
	}
}

// sleepUntil is exact to 0.1 ms. [time.Sleep] takes up to 1 ms longer in a process that has nothing else to do: then Go waits in
// epoll, which counts milliseconds.
func sleepUntil(due time.Time) {
	for left := time.Until(due); left > 0; left = time.Until(due) {
		timeout := unix.NsecToTimeval(left.Nanoseconds())
		_, _ = unix.Select(0, nil, nil, nil, &timeout) // a signal ends it early
	}
}
