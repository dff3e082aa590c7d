package main

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"time"
)

// latency is what a network adds to a round trip: half of it on the way to the server, half on the way back.
type latency time.Duration

// dial connects to a server through a proxy in this process.
func (l latency) dial(ctx context.Context, network, address string) (net.Conn, error) {
	there, err := newSleeper()
	if err != nil {
		return nil, err
	}
	back, err := newSleeper()
	if err != nil {
		return nil, errors.Join(err, there.Close())
	}
	server, err := new(net.Dialer).DialContext(ctx, network, address)
	if err != nil {
		return nil, errors.Join(err, there.Close(), back.Close())
	}
	client, near := net.Pipe()
	l.between(near, server, there, back)
	return client, nil
}

// between carries what two connections send. Closing either closes both.
func (l latency) between(near, server net.Conn, there, back sleeper) {
	go carry(near, server, time.Duration(l/2), there)
	go carry(server, near, time.Duration(l/2), back)
}

// A piece is bytes that were read at once, and when they are to be written.
type piece struct {
	bytes []byte
	due   time.Time
}

// carry writes what it reads so much later. Pieces wait in a queue, so none delays those behind it.
func carry(from, to net.Conn, delay time.Duration, s sleeper) {
	pieces := make(chan piece, 1024)
	go func() {
		defer s.Close()
		defer to.Close()
		for p := range pieces {
			err := s.sleep(time.Until(p.due))
			if err == nil {
				_, err = to.Write(p.bytes)
			}
			if err != nil {
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

// A sleeper sleeps for one goroutine at a time.
type sleeper interface {
	sleep(d time.Duration) error
	io.Closer
}

// goSleeper is [time.Sleep].
type goSleeper struct{}

func (goSleeper) sleep(d time.Duration) error {
	time.Sleep(d)
	return nil
}

func (goSleeper) Close() error { return nil }
