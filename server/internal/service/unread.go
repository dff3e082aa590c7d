package service

import (
	"sync"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
)

// The memory, in bytes, of long answers that are being made or are not read yet: of a server, of one of its connections, and of a
// stream.
const (
	roomOfAll        = 32 << 20
	roomOfConnection = roomOfAll / 4
	RoomOfStream     = roomOfConnection / 4
)

// A Size is that of a request with a list.
type Size struct {
	Operation       Operation
	Elements, Bytes int
}

// IsShort reports whether the answer takes no more than the call itself.
func (s Size) IsShort() bool { return s.Elements <= 10 }

// Memory is about what the request and its answer take. An error repeats texts of the request.
func (s Size) Memory() int64 { return int64(s.Elements)<<10 + 3*int64(s.Bytes) }

// A room counts the memory of answers.
type room struct {
	mu   sync.Mutex
	used int64
}

// A Connection has a part of the room.
type Connection struct {
	// Close ends the connection, whose answers are not read in time.
	Close func()

	used    int64
	isEnded bool
}

// A Place is the memory of one answer.
type Place struct {
	service *Service
	of      *Connection // nil where a connection has one answer at a time
	memory  int64
	timer   *time.Timer
	leave   sync.Once
}

// Place takes the memory of an answer, or returns an error if too much is in use. The caller leaves the place when the answer is
// read. A short answer has none.
func (s *Service) Place(of *Connection, size Size) (*Place, error) {
	if size.IsShort() {
		return nil, nil
	}
	p := &Place{service: s, of: of, memory: size.Memory()}
	s.room.mu.Lock()
	hasRoom := s.room.used+p.memory <= roomOfAll && (of == nil || !of.isEnded && of.used+p.memory <= roomOfConnection)
	if hasRoom {
		s.room.used += p.memory
		if of != nil {
			of.used += p.memory
		}
	}
	s.room.mu.Unlock()
	if !hasRoom {
		return nil, s.observeCall(Call{Operation: size.Operation, Err: newError(Overloaded)}, time.Now(), client.Decision{})
	}
	return p, nil
}

// Memory returns its bytes: 0 of nil.
func (p *Place) Memory() int64 {
	if p == nil {
		return 0
	}
	return p.memory
}

// Send begins the time in which the answer must be read.
func (p *Place) Send() { p.timer = p.service.Unread(p.of) }

// Unread closes a connection when its client has had time to read, unless it is stopped.
func (s *Service) Unread(of *Connection) *time.Timer {
	return time.AfterFunc(s.limits.ReadTime, of.Close)
}

// Leave gives the memory back. The place may be nil.
func (p *Place) Leave() {
	if p == nil {
		return
	}
	p.leave.Do(func() {
		if p.timer != nil {
			p.timer.Stop()
		}
		p.service.room.mu.Lock()
		defer p.service.room.mu.Unlock()
		if p.of != nil {
			if p.of.isEnded { // End has given it back
				return
			}
			p.of.used -= p.memory
		}
		p.service.room.used -= p.memory
	})
}

// End gives back the memory of a connection that has ended. Package grpc does not tell of answers that it could not write.
func (s *Service) End(of *Connection) {
	s.room.mu.Lock()
	defer s.room.mu.Unlock()
	s.room.used -= of.used
	of.used, of.isEnded = 0, true
}
