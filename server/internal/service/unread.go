package service

import (
	"sync"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
)

// The memory, in bytes, of long answers that are not read yet: of a server, of one of its connections, and of a stream.
const (
	memoryOfAll        = 32 << 20
	memoryOfConnection = memoryOfAll / 4
	MemoryOfStream     = memoryOfConnection / 4
)

// A Size is that of a request with a list.
type Size struct {
	Operation       Operation
	Elements, Bytes int
}

// IsShort reports whether the answer takes no more than the call itself.
func (s Size) IsShort() bool { return s.Elements <= 10 }

// A Connection has a part of the memory.
type Connection struct {
	// Close ends the connection, whose answers are not read in time.
	Close func()

	used    int64
	isEnded bool
}

// An Unread answer has memory until Done. It may be nil: a short answer has none.
type Unread struct {
	Memory int64

	service *Service
	of      *Connection // nil where a connection has one answer at a time
	timer   *time.Timer
	done    sync.Once
}

// ReserveAnswer takes the memory of an answer, or returns an error if too much is in use.
func (s *Service) ReserveAnswer(of *Connection, size Size) (*Unread, error) {
	if size.IsShort() {
		return nil, nil
	}
	memory := int64(size.Elements)<<10 + 3*int64(size.Bytes) // about: an error repeats texts of the request
	s.unreadMu.Lock()
	defer s.unreadMu.Unlock()
	if s.unreadBytes+memory > memoryOfAll || of != nil && (of.isEnded || of.used+memory > memoryOfConnection) {
		return nil, s.observeCall(Call{Operation: size.Operation, Err: newError(Overloaded)}, time.Now(), client.Decision{})
	}
	s.unreadBytes += memory
	if of != nil {
		of.used += memory
	}
	return &Unread{service: s, of: of, Memory: memory}, nil
}

// Sent begins the time in which the answer must be read.
func (u *Unread) Sent() { u.timer = u.service.CloseUnlessRead(u.of) }

// CloseUnlessRead closes a connection when its client has had time to read, unless the timer is stopped.
func (s *Service) CloseUnlessRead(of *Connection) *time.Timer {
	return time.AfterFunc(s.limits.ReadTime, of.Close)
}

// Done gives the memory back.
func (u *Unread) Done() {
	if u == nil {
		return
	}
	u.done.Do(func() {
		if u.timer != nil {
			u.timer.Stop()
		}
		u.service.unreadMu.Lock()
		defer u.service.unreadMu.Unlock()
		if u.of != nil {
			if u.of.isEnded { // End has given it back
				return
			}
			u.of.used -= u.Memory
		}
		u.service.unreadBytes -= u.Memory
	})
}

// End gives back the memory of a connection that has ended. Package grpc does not tell of answers that it could not write.
func (s *Service) End(of *Connection) {
	s.unreadMu.Lock()
	defer s.unreadMu.Unlock()
	s.unreadBytes -= of.used
	of.used, of.isEnded = 0, true
}
